"""The scripts of docs/examples save and resume, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ucp

EXAMPLES = sorted((Path(__file__).resolve().parents[4] / "docs" / "examples").glob("save_*.py"))
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
