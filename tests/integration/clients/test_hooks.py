"""Clients resume from checkpoints of other frameworks and world sizes by the code of docs/how-to/resume-in-a-client.md.

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
    assert not set(told["losses"]) - set(LATER)
