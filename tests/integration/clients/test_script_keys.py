"""A script loads, at another world size and by its own state dict, what `--set style=source` made of its checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("script_keys_worker.py")


def run(ranks: int, *options: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(WORKER), *options], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("keys", ["optim", "app", "bare", "numbers"])
def test_the_script_that_saved_it_loads_it(keys: str, tmp_path: Path) -> None:
    run(2, "--keys", keys, "--save", str(tmp_path / "saved"))
    settings = {"style": "source"}
    ucp.convert(tmp_path / "saved", tmp_path / "written", to="dcp", topology="dp=3", settings=settings, verify=True)
    run(3, "--keys", keys, "--load", str(tmp_path / "written"), "--out", str(tmp_path / "loaded.pt"))
    wanted, loaded = (torch.load(tmp_path / own, weights_only=False) for own in ("saved/saved.pt", "loaded.pt"))
    assert same(wanted, loaded)
