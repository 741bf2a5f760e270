"""Runs whose ranks each train some columns of the word embedding go on with other numbers of ranks, and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

import ucp

FIXTURES = Path(__file__).resolve().parents[4] / "fixtures"
sys.path.insert(0, str(FIXTURES / "make" / "columns"))

from make_columns import CASES, run  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ROOT = FIXTURES / "columns"
RULES = ROOT / "rules.toml"


def go_on(case: str, checkpoint: Path, ranks: int, out: Path, **job: object) -> list[float]:
    """Losses of three steps after those of the fixture."""
    out.mkdir()
    how = {**CASES[case][1], "load": str(checkpoint), "save": None, "first": 3, "steps": 3, "after": 0}
    return run(ranks, {**how, "out": str(out), **job})["losses"]


def losses_after(case: str) -> list[float]:
    losses: list[float] = json.loads((ROOT / case / "losses.json").read_text())["losses_after"]
    return losses


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_run_goes_on_with_four_ranks_whole_and_with_two(case: str, tmp_path: Path) -> None:
    checkpoint = ROOT / case / "checkpoint"
    for ranks in (4, 1, 2):
        written = tmp_path / f"for-{ranks}"
        to = case.partition("-")[0]
        parts = f",ep={ranks},zero=1" if to == "deepspeed" else ""
        ucp.convert(checkpoint, written, to=to, topology=f"dp={ranks}{parts}", patterns=RULES)
        losses = go_on(case, written, ranks, tmp_path / f"out-{ranks}", stage=1)
        assert losses == pytest.approx(losses_after(case), rel=2e-3 if "bf16" in case else 1e-6), ranks
        checkpoint = written


def test_a_running_model_is_filled_for_its_number_of_ranks(tmp_path: Path) -> None:
    case = "torch-dp2"
    losses = go_on(case, ROOT / case / "checkpoint", 4, tmp_path / "out", rules=str(RULES))
    assert losses == pytest.approx(losses_after(case), rel=1e-6)
