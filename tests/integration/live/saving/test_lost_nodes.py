"""Six processes train a mixture of experts, two are killed at a random point, four go on as if nothing had happened.

The program is that of the tutorial: its gradients are added in the order of the samples, so that losses do not depend
on the number of processes, and are compared bit for bit.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PAGE = Path(__file__).resolve().parents[4] / "docs" / "tutorial" / "lose-two-nodes.md"
STEPS, SAVE_EVERY = 24, 8
KILLS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program and the loads."""
    folder = tmp_path_factory.mktemp("nodes")
    text = PAGE.read_text()
    (script,) = re.findall(r"^```py\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert script.count(" 12, 8, 60\n") == script.count("step % 20 ") == 1
    script = script.replace(" 12, 8, 60\n", f" 12, 8, {STEPS}\n").replace("step % 20 ", f"step % {SAVE_EVERY} ")
    (folder / "train.py").write_text(script)
    (loads,) = re.findall(r"^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (folder / "loads.json").write_text(loads)
    return folder


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.txt").open("wb") as output:
        return subprocess.Popen([sys.executable, "train.py", name], cwd=folder, env=env, stdout=output, stderr=output)


def losses(log: Path) -> list[str]:
    """The lines of all steps, each once: a step that is done again has the same loss."""
    lines = dict.fromkeys(line for line in log.read_text().splitlines() if ": loss " in line)
    return sorted(lines, key=lambda line: int(line.split(":")[0].removeprefix("step ")))


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[str]:
    """Losses of six processes of which none is killed."""
    assert start(folder, "calm").wait(300) == 0
    expected = losses(folder / "calm" / "0.log")
    assert len(expected) == STEPS
    assert float(expected[-1].split()[-1]) < float(expected[0].split()[-1]) / 2  # it learns
    return expected


@pytest.mark.parametrize("seed", range(KILLS))
def test_four_of_six_go_on_from_their_memory(folder: Path, undisturbed: list[str], seed: int) -> None:
    choose = random.Random(seed)
    victims, step = choose.sample(range(6), 2), choose.randint(1, STEPS - 4)
    delays = choose.uniform(0, 0.3), choose.choice([0, choose.uniform(0, 0.1)])
    name = f"run{seed}"
    program = start(folder, name)
    logs = [folder / name / f"{node}.log" for node in range(6)]
    deadline = time.monotonic() + 200
    while not (logs[0].exists() and f"step {step}:" in logs[0].read_text()):
        assert time.monotonic() < deadline, (folder / f"{name}.txt").read_text()[-4000:]
        time.sleep(0.01)
    for victim, delay in zip(victims, delays, strict=True):
        time.sleep(delay)
        os.kill(int((folder / name / f"{victim}.pid").read_text()), signal.SIGKILL)
    assert program.wait(200) == 0
    survivors = [log for node, log in enumerate(logs) if node not in victims]
    resumed = set()
    for log in survivors:
        text = log.read_text()
        assert losses(log) == undisturbed, (victims, step, delays, (folder / f"{name}.txt").read_text()[-4000:])
        assert len(re.findall("round 0 is over", text)) == 1
        (line,) = re.findall("resumed at step .*", text)
        resumed.add(line)
    (line,) = resumed  # all at one step
    assert line.endswith(": 0 bytes from files")
    print(f"killed {victims} after step {step} + {delays[0]:.2f} s; {line}")
