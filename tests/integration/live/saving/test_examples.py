"""The scripts of docs/examples save and resume, on two ranks or more."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ucp

FOLDER = Path(__file__).resolve().parents[4] / "docs" / "examples"
EXAMPLES = sorted(FOLDER.glob("save_*.py"))
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_saves_and_resumes(script: Path, tmp_path: Path) -> None:
    if "deepspeed" in script.stem and find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed; `make integration` installs it")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for step in (20, 40):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        subprocess.run([*launcher, str(script), str(tmp_path / "run")], env=env, check=True, timeout=300)
        assert ucp.inspect(tmp_path / "run").step == step
    index = ucp.inspect(tmp_path / "run")
    steps = {ucp.open(tmp_path / "run").read(name, state="step").item() for name in index.atoms}
    assert steps == {40}  # the optimizer went on from step 20


@pytest.mark.parametrize("ranks", [2, 3])
def test_fsdp2_goes_on_with_the_losses_of_deepspeed(ranks: int) -> None:
    """The script compares them itself, and fails if they differ."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, str(FOLDER / "resume_in_fsdp2.py")], env=env, check=True, timeout=300, stdout=-1)
    assert b"2.764925" in done.stdout
