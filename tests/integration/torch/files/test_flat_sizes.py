"""FSDP1's LOCAL_STATE_DICT of random models of odd sizes, read bit for bit as FSDP itself gathers them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ucp
from ucp.errors import UnsupportedError

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("flat_sizes_worker.py")
SEEDS = range(40)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_parameter_is_as_gathered(ranks: int, tmp_path: Path) -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(WORKER),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, str(tmp_path), *map(str, SEEDS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = [check(tmp_path / str(seed)) for seed in SEEDS]
    assert {outcome for outcome in outcomes if outcome[:2] != (False, False)} == {
        (use_orig_params, is_named, "equal")
        for use_orig_params, is_named in [(True, True), (True, False), (False, True)]
    }
    assert outcomes.count((False, False, "equal")) > 1


def check(case: Path) -> tuple[bool, bool, str]:
    """Compare one checkpoint with the truth: kinds of parameters and optimizer, and what came out."""
    kind = json.loads((case / "kind.json").read_text())
    use_orig_params, is_named = kind["use_orig_params"], kind["is_named"]
    truth: dict[str, torch.Tensor] = torch.load(case / "truth.pt")
    for shapes in [case / "shapes.json", *([None] if is_named else [])]:
        try:
            checkpoint = ucp.open(case / "checkpoint", shapes_from=shapes)
        except UnsupportedError:
            return use_orig_params, is_named, "refused"
        aliases = checkpoint.index.aliases
        states = {f"{atom.name}/{state}" for atom, state, _ in checkpoint.index.states()}
        states |= {f"{alias}/weight" for alias in aliases}
        unsaved = truth.keys() - states  # the second name of a tied parameter is not in the files
        assert all("tied" in name and not use_orig_params for name in unsaved), (case, unsaved)
        assert states <= truth.keys()
        for name in states:
            param, _, state = name.rpartition("/")
            actual = torch.as_tensor(checkpoint.read(aliases.get(param, param), state))
            assert torch.equal(actual, truth[name]), (case, name)
    return use_orig_params, is_named, "equal"
