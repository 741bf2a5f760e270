"""The Hugging Face Trainer and accelerate resume, over FSDP, from what `ucp convert` wrote, and cross to DeepSpeed.

Both save at step 3 of 6 on two ranks, in sharded state dicts, and go on to the end. The same script resumes from a
conversion on other ranks, with FSDP of the other version, or over the other framework: right after the load it holds
what was saved, bit for bit, and its losses and rates are those of the run that went on. What it keeps itself (steps
done, scheduler, random states of as many ranks) comes from the files beside.

FSDP1 is only saved here: accelerate 1.15 does not restore its optimizer from a sharded state dict, from its own no
more than from a conversion, for it asks torch for the states that a new optimizer has, which are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ucp
from tests.integration.clients.client_runs import CHECKPOINT, LATER, TOLERANCE, python_with, run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1500)]

NEEDED = ("transformers", "accelerate")
SAVING_RANKS = 2


@dataclass(frozen=True)
class Run:
    """A script over a framework."""

    script: str
    over: tuple[str, ...]
    """Arguments that say which framework."""

    @property
    def name(self) -> str:
        return "".join((self.script, *self.over))

    @property
    def by_deepspeed(self) -> bool:
        return "--stage" in self.over


TRAINER, ACCELERATE = (Run(script, ("--fsdp", "2")) for script in CHECKPOINT)
TIED = Run("trainer", ("--fsdp", "2", "--tied"))
FSDP1 = Run("trainer", ("--fsdp", "1"))
TRAINER_ZERO2, ACCELERATE_ZERO2 = (Run(script, ("--stage", "2")) for script in CHECKPOINT)
TRAINER_ZERO3, ACCELERATE_ZERO3 = (Run(script, ("--stage", "3")) for script in CHECKPOINT)
MOVES = [
    (TRAINER, TRAINER, 4),
    (TIED, TIED, 4),
    (FSDP1, TRAINER, 4),
    (ACCELERATE, ACCELERATE, 4),
    (ACCELERATE, ACCELERATE, 2),
    (TRAINER, TRAINER_ZERO3, 2),
    (ACCELERATE, ACCELERATE_ZERO3, 2),
    (TRAINER_ZERO2, TRAINER, 4),
    (ACCELERATE_ZERO2, ACCELERATE, 4),
]


@dataclass(frozen=True)
class Saved:
    """A run that was saved and went on."""

    checkpoint: Path
    told: dict[str, Any]
    held: dict[str, torch.Tensor]
    """All weights and states when it was saved."""


class Runs:
    """Runs that were saved, each made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[Run, Saved] = {}

    def saved(self, of: Run) -> Saved:
        if of not in self._made:
            folder, out = self._root / of.name, self._root / f"{of.name}.json"
            told = run(python_for(of), out, of.script, *of.over, "--save", folder, ranks=SAVING_RANKS)
            held = load_file(out.with_suffix(".safetensors"))
            self._made[of] = Saved(folder / CHECKPOINT[of.script], told, held)
        return self._made[of]


def python_for(of: Run) -> str:
    return python_with((*NEEDED, "deepspeed") if of.by_deepspeed else NEEDED)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("saved"))


def converted(checkpoint: Path, out: Path, client: Run, ranks: int) -> ucp.ConvertReport:
    """The checkpoint, as a client loads it."""
    if client.by_deepspeed:
        topology = ucp.Topology(dp=ranks, zero=int(client.over[1]))
        tag = "pytorch_model" if client.script == "accelerate" else None  # accelerate asks for this one
        return ucp.convert(checkpoint, out, to="deepspeed", topology=topology, tag=tag, verify=True)
    topology, settings = ucp.Topology(dp=ranks), {"style": "accelerate"}
    return ucp.convert(checkpoint, out, to="dcp", topology=topology, settings=settings, verify=True)


@pytest.mark.parametrize(
    ("source", "client", "ranks"), MOVES, ids=[f"{one.name}-{other.name}-dp{ranks}" for one, other, ranks in MOVES]
)
def test_a_client_goes_on(source: Run, client: Run, ranks: int, runs: Runs, tmp_path: Path) -> None:
    saved = runs.saved(source)
    report = converted(saved.checkpoint, tmp_path / "resumed", client, ranks)
    out = tmp_path / "told.json"
    asked = (client.script, *client.over, "--resume", tmp_path / "resumed")
    told = run(python_for(client), out, *asked, ranks=ranks)

    held = load_file(out.with_suffix(".safetensors"))
    counts = {name for name in saved.held.keys() ^ held.keys() if name.endswith("/step")}  # not by DeepSpeed
    assert saved.held.keys() ^ held.keys() == counts
    for name in held.keys() & saved.held.keys():
        assert torch.equal(held[name], saved.held[name]), name

    for step in LATER:
        assert told["losses"][step] == pytest.approx(saved.told["losses"][step], rel=TOLERANCE)
        assert told["rates"][step] == saved.told["rates"][step]
    earlier = {step: loss for step, loss in told["losses"].items() if step not in LATER}
    history = {step: loss for step, loss in saved.told["losses"].items() if step not in LATER}
    assert earlier == (history if client.script == "trainer" else {})  # which is in trainer_state.json
    left = any("of single ranks" in line for line in report.dropped)
    assert left is (ranks != SAVING_RANKS)
    if client.script == "accelerate":
        assert (told["random"] == saved.told["random"]) is (ranks == SAVING_RANKS)
