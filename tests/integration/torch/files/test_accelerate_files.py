"""What accelerate saves of a model under FSDP by torch.save, read bit for bit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ucp
from tests.integration.torch.files.test_trainer_files import python  # noqa: F401

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("accelerate_files_worker.py")
WAYS = ("ranks-2", "full-2", "local-1", "local-orig-1")


def test_every_way_of_saving_is_the_truth(python: str, tmp_path: Path) -> None:  # noqa: F811
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, str(WORKER), str(tmp_path)], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    truth = load_file(tmp_path / "truth.safetensors")
    for way in WAYS:
        checkpoint = ucp.open(tmp_path / way)
        assert {f"{atom.name}/{state}" for atom, state, _ in checkpoint.index.states()} == truth.keys()
        for name, wanted in truth.items():
            param, _, state = name.rpartition("/")
            assert torch.equal(checkpoint.read(param, state), wanted), (way, name)
