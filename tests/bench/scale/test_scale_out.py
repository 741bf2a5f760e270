"""`make bench-scale` looks for the page it writes to before it measures for minutes."""

import sys

import pytest

from tests.bench.scale import __main__ as bench


def test_a_folder_without_the_page_is_refused_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path)])
    monkeypatch.setattr(bench, "_measured", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as caught:
        bench.main()
    assert caught.value.code == 2
    assert f"expected the page scale.md in {tmp_path}" in capsys.readouterr().err
