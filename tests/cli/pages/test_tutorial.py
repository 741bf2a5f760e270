"""Tutorials run as they stand: their scripts, and their commands one after another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ucp

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PAGES = Path(__file__).resolve().parents[3] / "docs" / "tutorial"


def run(page: str, folder: Path) -> dict[str, list[str]]:
    """Save the script of a page, run its commands in `folder`, and return what they print."""
    text = (PAGES / page).read_text()
    (script,) = re.findall(r"^```py\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (folder / "train.py").write_text(script)
    for loads in re.findall(r"^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        (folder / "loads.json").write_text(loads)
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    printed: dict[str, list[str]] = {}
    for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
        done = subprocess.run(
            command, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=500
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        printed.setdefault(command, []).append(done.stdout)
    return printed


def test_the_commands_of_the_tutorial_on_chains_run(tmp_path: Path) -> None:
    printed = run("a-chain-from-a-small-moe.md", tmp_path)
    assert printed["ucp inspect run --exact || echo refused"][0].endswith("refused\n")
    index = ucp.inspect(tmp_path / "run")
    assert index.step == 100
    assert ucp.inspect(tmp_path / "run", at=30).step == 30
    older = {atom.iteration for atom in index.atoms.values()}
    assert older == {None, 70, 80, 90}  # eight experts by twos, in turn: all are of the last four saves


def test_the_commands_of_the_tutorial_on_lost_nodes_run(tmp_path: Path) -> None:
    printed = run("lose-two-nodes.md", tmp_path)  # `cmp` fails if losses differ
    (moved,) = (text for command, (text,) in printed.items() if "--lost" in command)
    assert re.search(r"^time ", moved, re.MULTILINE)
    assert "from storage" not in moved
    (counters,) = (text for command, (text,) in printed.items() if command.startswith("grep bytes"))
    assert counters.count(": 0 bytes from files") == 4
    received = sorted(int(number) for number in re.findall(r"(\d+) from that of others", counters))
    assert received[:3] == [0, 0, 0]
    assert f"{received[3] / 1024:.0f}" in "".join(re.findall(r"^bytes .*", moved, re.MULTILINE))
    assert len((tmp_path / "expected.txt").read_text().splitlines()) == 60
