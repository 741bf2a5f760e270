"""`ucp bench`: the floor of a machine."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_every_way_is_measured_and_nothing_stays(ucp: Run, tmp_path: Path) -> None:
    page = ucp("bench", tmp_path, "--size", "1M", "--workers", 2).stdout
    assert page.count("copy, with digests") == 2
    assert "2 threads" in page
    assert list(tmp_path.iterdir()) == []


def test_json(ucp: Run, tmp_path: Path) -> None:
    document = json.loads(ucp("bench", tmp_path, "--size", "300K", "--workers", 1, "--json").stdout)
    assert document["schema"] == "ucp.bench/1"
    assert [rate["what"] for rate in document["rates"]] == [
        "write",
        "write and fsync",
        "read",
        "copy",
        "copy, with digests",
    ]
    assert all(rate["nbytes"] == 300 << 10 and rate["bytes_per_second"] > 0 for rate in document["rates"])


def test_mistakes(ucp: Run, tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in ucp("bench", tmp_path / "nothing", code=1).stderr
    assert "or more to measure with" in ucp("bench", tmp_path, "--size", "1K", code=2).stderr
