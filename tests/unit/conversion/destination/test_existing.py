from __future__ import annotations

from ucp.conversion.destination.existing import check_destination


def test_a_current_folder_that_is_gone_is_in_nobodys_way(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    check_destination(tmp_path / "source", tmp_path / "out")
