"""The Hugging Face Trainer and accelerate resume, over DeepSpeed, from what `ucp convert` wrote of their checkpoints.

Both save at step 3 of 6 with two ranks under ZeRO 2, and go on to the end. A run of other ranks and another stage that
resumes from a conversion has the losses and rates of that one; its own state (steps done, the scheduler, objects of the
script, the random states of as many ranks) comes from the files beside the tag folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.integration.clients.client_runs import CHECKPOINT, LATER, TOLERANCE, python_with, run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1500)]

NEEDED = ("deepspeed", "transformers", "accelerate")


@dataclass(frozen=True)
class Case:
    script: str
    to: str
    ranks: int
    stage: int

    @property
    def name(self) -> str:
        return f"{self.script}-{self.to}-dp{self.ranks}-zero{self.stage}"

    @property
    def universal(self) -> bool:
        return self.to == "deepspeed-universal"


CASES = [
    Case(script, to, ranks, stage)
    for script in CHECKPOINT
    for to, ranks, stage in (("deepspeed", 1, 3), ("deepspeed", 2, 1), ("deepspeed-universal", 1, 1))
]


@pytest.fixture(scope="module")
def python() -> str:
    return python_with(NEEDED)


@pytest.fixture(scope="module")
def saved(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Script to its checkpoint and to what it told of the whole run."""
    root = tmp_path_factory.mktemp("saved")
    return {
        script: (
            root / script / name,
            run(python, root / f"{script}.json", script, "--stage", 2, "--save", root / script, ranks=2),
        )
        for script, name in CHECKPOINT.items()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_goes_on_from_a_conversion(case: Case, python, saved, tmp_path):
    checkpoint, whole = saved[case.script]
    ucp.convert(checkpoint, tmp_path / "atoms")
    topology = None if case.universal else ucp.Topology(dp=case.ranks, zero=case.stage)
    ucp.convert(tmp_path / "atoms", tmp_path / "resumed", to=case.to, topology=topology, verify=True)
    asked = ["--stage", case.stage, "--resume", tmp_path / "resumed", *(["--universal"] if case.universal else [])]
    told = run(python, tmp_path / "told.json", case.script, *asked, ranks=case.ranks)
    for step in LATER:
        assert told["losses"][step] == pytest.approx(whole["losses"][step], rel=TOLERANCE)
        assert told["rates"][step] == whole["rates"][step]
    if case.script == "trainer":  # its history comes from trainer_state.json
        assert {step: loss for step, loss in told["losses"].items() if step not in LATER} == {
            step: loss for step, loss in whole["losses"].items() if step not in LATER
        }
    else:
        assert tuple(told["losses"]) == LATER
        assert (told["random"] == whole["random"]) is (case.ranks == 2)
