"""`ucp advise`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run

MIXTRAL = Path(__file__).parents[3] / "fixtures" / "megatron" / "mixtral-pp2-ep2-dp2-dp" / "checkpoint"


def test_a_checkpoint_tells_the_model(ucp: Run) -> None:
    numbers = ("--iter-time", "0.5-1", "--mtbf", 1, "--bandwidth", "1MB", "--copy-bandwidth", "1MB")
    document = json.loads(ucp("advise", "--checkpoint", MIXTRAL, *numbers, "--json").stdout)
    assert document["schema"] == "ucp.advise/1"
    assert document["run"]["experts"] == {"low": 4, "high": 4}
    assert document["run"]["mtbf"]["low"] == 3600
    page = ucp("advise", "--checkpoint", MIXTRAL, *numbers).stdout
    assert document["best"] in page


def test_mistakes(ucp: Run) -> None:
    assert "bandwidth" in ucp("advise", "--iter-time", 1, "--mtbf", 1, code=2).stderr
    numbers = ("--iter-time", 1, "--mtbf", 1, "--bandwidth", "1GB", "--params-dense", "1G", "--params-expert", "8G")
    assert "2-4.5" in ucp("advise", *numbers, "--experts", "2-4.5", code=2).stderr
    assert "'a lot'" in ucp("advise", "--iter-time", "a lot", code=2).stderr


def test_a_picture_is_drawn(ucp: Run, tmp_path: Path) -> None:
    numbers = ("--iter-time", 1, "--mtbf", "3..12", "--bandwidth", "1GB", "--params-dense", "1G")
    ucp("advise", *numbers, "--plot", tmp_path / "ways.svg")
    assert "asynchronous" in (tmp_path / "ways.svg").read_text()
    assert ".txt" in ucp("advise", *numbers, "--plot", tmp_path / "ways.txt", code=2).stderr
