"""`ucp convert --part` and `--finalize`: as real processes where several run at once or one is killed."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.unit.conftest import shrink, tree

PROGRAM = """
import os, sys, threading
from importlib import import_module
from ucp.conversion.parts.journals import PartJournal
from ucp.transfer.worker import Worker
from ucp_cli.main import main

import_module("ucp.conversion.destination.staging")._PATIENCE = 0.5
for name in ("transfer.plan.job", "transfer.worker", "conversion.prepare", "store.describe"):
    module = import_module(f"ucp.{name}")
    if hasattr(module, "BLOCK"):
        module.BLOCK = 64
import_module("ucp.transfer.plan.job").TASK = 128
carry_out, note, left = Worker.carry_out, PartJournal.note, [int(sys.argv.pop(1))]

def stuck(worker, task):
    if left[0] == 0:
        threading.Event().wait()
    left[0] -= 1
    return carry_out(worker, task)

def telling(journal, done):
    note(journal, done)
    os.write(1, b"noted\\n")

if left[0] >= 0:
    Worker.carry_out, PartJournal.note = stuck, telling
main()
"""
"""`ucp` with blocks so small that a small checkpoint is many tasks.

Its number says after how many tasks a worker gets stuck (-1: never); then it says when a task is noted as done.
"""


def command(*words: object, stuck_after: int = -1) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(stuck_after), "convert", *map(str, words)]


def at_once(*commands: list[str]) -> list[str]:
    """What commands say that run at the same time, all to a good end."""
    started = [subprocess.Popen(own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for own in commands]
    said = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * len(commands), said
    return [out for out, _ in said]


@contextlib.contextmanager
def stuck(*words: object, after: int, workers: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A part that did `after` tasks and stays; ended in the end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    asked = command(*words, "--workers", workers, stuck_after=after)
    with subprocess.Popen(asked, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert [process.stdout.readline() for _ in range(after)] == ["noted\n"] * after
            yield process
        finally:
            process.kill()


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def as_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process have blocks and patience as small as those of `PROGRAM`."""
    shrink(monkeypatch, block=64, task=128)
    monkeypatch.setattr(import_module("ucp.conversion.destination.staging"), "_PATIENCE", 0.5)


@pytest.fixture
def wanted(ucp: Run, mixed: Path, tmp_path: Path) -> dict[str, bytes]:
    ucp("convert", mixed, tmp_path / "whole", "--workers", 1, "-q")
    return tree(tmp_path / "whole")


def test_parts_that_begin_at_the_same_moment(ucp: Run, mixed: Path, tmp_path: Path, dst: Path) -> None:
    """Other sources and targets in parts: tests/unit/conversion/parts, one process after another."""
    options = ["--to", "deepspeed-universal"]
    ucp("convert", mixed, tmp_path / "whole", "--workers", 1, *options)
    at_once(*(command(mixed, dst, *options, "--workers", 2, "--part", f"{number}/4") for number in (3, 1, 4, 2)))
    assert not dst.exists()
    ucp("convert", mixed, dst, *options, "--finalize")
    assert tree(dst) == tree(tmp_path / "whole")
    ucp("verify", dst, "--against", mixed)


def test_the_same_part_twice_at_once(ucp: Run, mixed: Path, dst: Path, wanted: dict[str, bytes]) -> None:
    ucp("convert", mixed, dst, "--part", "2/2")
    at_once(*[command(mixed, dst, "--part", "1/2")] * 3)
    ucp("convert", mixed, dst, "--finalize")
    assert tree(dst) == wanted


@pytest.mark.parametrize("workers", [1, 2])
def test_a_part_that_is_killed_is_run_again(
    ucp: Run, mixed: Path, dst: Path, wanted: dict[str, bytes], workers: int
) -> None:
    with stuck(mixed, dst, "--part", "1/2", after=2, workers=workers) as part:
        part.kill()
    ucp("convert", mixed, dst, "--part", "2/2")
    said = ucp("convert", mixed, dst, "--finalize", code=1).stderr
    assert "part 1/2: " in said
    assert "cut off" in said
    assert "with --part 1/2 in place" in said
    assert "Traceback" not in said
    assert not dst.exists()
    again = json.loads(ucp("convert", mixed, dst, "--part", "1/2", "--json").stdout)
    assert (again["part"], again["schema"]) == ("1/2", "ucp.convert/1")
    assert again["resumed_bytes"] > 0
    ucp("convert", mixed, dst, "--finalize", "--verify")
    assert tree(dst) == wanted


def test_what_needs_the_place_for_itself_is_refused_while_a_part_runs(
    ucp: Run, mixed: Path, dst: Path, wanted: dict[str, bytes]
) -> None:
    with stuck(mixed, dst, "--part", "1/2", after=1) as part:
        ucp("convert", mixed, dst, "--part", "2/2")
        for option in ("--finalize", "--resume", "--overwrite"):
            said = ucp("convert", mixed, dst, option, code=1).stderr
            assert "1 part of" in said
            assert f"process {part.pid}" in said
        assert "1 part of" in ucp("convert", mixed, dst, code=1).stderr
    ucp("convert", mixed, dst, "--part", "1/2")
    said = ucp("convert", mixed, dst, "--finalize").stdout
    assert "already there: " in said
    assert " trusted from the journal\n" in said
    assert tree(dst) == wanted


def test_a_part_that_is_terminated_says_how_to_go_on(mixed: Path, dst: Path) -> None:
    with stuck(mixed, dst, "--part", "1/2", after=1, workers=2) as part:
        part.send_signal(signal.SIGTERM)
        _, said = part.communicate(timeout=60)
    assert said == f"Error: terminated; the same command continues this part of {dst}\n"
    assert part.returncode == 143


def test_parts_of_a_step_and_of_an_array(
    ucp: Run, mixed: Path, tmp_path: Path, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = {
        f"SLURM_ARRAY_TASK_{name}": own for name, own in (("MIN", "1"), ("MAX", "3"), ("STEP", "1"), ("COUNT", "3"))
    }
    ways = {
        "step": [{"SLURM_PROCID": str(task), "SLURM_NTASKS": "2"} for task in range(2)],
        "array": [array | {"SLURM_ARRAY_TASK_ID": str(own)} for own in (1, 2, 3)],
    }
    for way, environments in ways.items():
        for environment in environments:
            with monkeypatch.context() as patch:
                for name, own in environment.items():
                    patch.setenv(name, own)
                ucp("convert", mixed, tmp_path / way, "--part", "auto")
        ucp("convert", mixed, tmp_path / way, "--finalize")
        assert tree(tmp_path / way) == wanted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--part", "9/8"], "K/N such as 3/8"),
        (["--part", "1/2", "--finalize"], "drop --part"),
        (["--part", "1/2", "--verify"], "drop --part"),
    ],
)
def test_what_cannot_mean_anything(ucp: Run, mixed: Path, dst: Path, words: list[str], said: str) -> None:
    assert said in ucp("convert", mixed, dst, *words, code=2).output
    assert not dst.with_name("out.ucp-partial").exists()
