"""The tutorial on chains runs as it stands: its script, and its commands one after another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ucp

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tutorial" / "a-chain-from-a-small-moe.md"


def test_the_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    text = PAGE.read_text()
    (script,) = re.findall(r"^```py\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(script)
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    said = {}
    for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        said.setdefault(command, []).append(done.stdout)
    assert said["ucp inspect run --exact || echo refused"][0].endswith("refused\n")
    index = ucp.inspect(tmp_path / "run")
    assert index.step == 100
    assert ucp.inspect(tmp_path / "run", at=30).step == 30
    older = {atom.iteration for atom in index.atoms.values()}
    assert older == {None, 70, 80, 90}  # eight experts by twos, in turn: all are of the last four saves
