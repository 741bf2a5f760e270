"""The Trainer and accelerate resume from checkpoints of other frameworks and world sizes by `ucp.integrations`.

What the Trainer and accelerate saved at step 3 of 6, over DeepSpeed or FSDP2 on two ranks, is brought into the same
script on other ranks, over other frameworks, without a conversion: right after it is loaded the run holds what was
saved, bit for bit, and its losses and rates are those of the run that went on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.clients.client_runs import LATER, TOLERANCE, run
from tests.integration.clients.test_fsdp_clients import Run, Runs, python_for

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1500)]

MOVES = [
    (("--stage", "2"), (), 4),
    (("--stage", "3"), (), 1),
    (("--fsdp", "2"), (), 2),
    (("--stage", "2"), ("--fsdp", "2"), 4),
    (("--fsdp", "2"), ("--fsdp", "2"), 4),
    (("--fsdp", "2"), ("--stage", "3"), 4),
    (("--stage", "3"), ("--stage", "1"), 1),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("script", ["trainer", "accelerate"])
@pytest.mark.parametrize(
    ("source", "over", "ranks"), MOVES, ids=["".join((*a, "-to", *b, f"-dp{n}")) for a, b, n in MOVES]
)
def test_a_client_goes_on(
    script: str, source: tuple[str, ...], over: tuple[str, ...], ranks: int, runs: Runs, tmp_path: Path
) -> None:
    saved = runs.saved(Run(script, source))
    client, out = Run(script, over), tmp_path / "told.json"
    told = run(python_for(client), out, script, *over, "--resume", saved.checkpoint, "--hook", ranks=ranks)

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
    assert earlier == (history if script == "trainer" else {})  # which is in trainer_state.json


def test_the_trainer_goes_on_in_a_later_epoch(tmp_path: Path) -> None:
    """The data of each epoch is shuffled, and its last step has a batch less."""
    python, over = python_for(Run("trainer", ("--fsdp", "2"))), ("--samples", "6", "--accumulate", "2")
    whole = run(python, tmp_path / "whole.json", "trainer", *over, "--save", tmp_path / "saved", ranks=1)
    resume = ("--resume", tmp_path / "saved" / "checkpoint-3", "--hook")
    told = run(python, tmp_path / "told.json", "trainer", *over, *resume, ranks=2)
    assert whole["epochs"]["3"] > 1
    assert told["epochs"] == whole["epochs"]
    assert told["rates"] == whole["rates"]
    for step in LATER:
        assert told["losses"][step] == pytest.approx(whole["losses"][step], rel=TOLERANCE)


def test_the_trainer_goes_on_from_what_no_trainer_saved(runs: Runs, tmp_path: Path) -> None:
    """The number of steps is known: so is the place in the data, and the rate of a schedule of two groups."""
    source, out = Run("accelerate", ("--fsdp", "2")), tmp_path / "told.json"
    saved = runs.saved(source)
    resume = ("--resume", saved.checkpoint, "--hook", "--schedule", "advance")
    told = run(python_for(source), out, "trainer", *resume, ranks=1)
    held = load_file(out.with_suffix(".safetensors"))
    assert held.keys() == saved.held.keys()
    for name in held:
        assert torch.equal(held[name], saved.held[name]), name
    assert tuple(told["losses"]) == LATER
    assert told["epochs"]["4"] == pytest.approx(4 / 12)
    assert told["rates"]["4"] == pytest.approx(0.01 * (6 - 3) / 6)
