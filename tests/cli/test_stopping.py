"""SIGTERM or SIGHUP, sent to a real process: one line, exit code 143 or 129, no process left, and --resume goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.conftest import Run
from tests.unit.conftest import shrink
from ucp_cli.stopping import Terminated, heed_termination
from ucp_cli.verbs import cli

PROGRAM = """
import os, signal, sys, threading
from importlib import import_module
from ucp.conversion.destination.staging import Staging
from ucp.transfer.worker import Worker
from ucp_cli.main import main

for name in (
    "transfer.plan.job",
    "transfer.worker",
    "transfer.compare",
    "conversion.prepare",
    "store.describe",
):
    module = import_module(f"ucp.{name}")
    if hasattr(module, "BLOCK"):
        module.BLOCK = 64
import_module("ucp.transfer.plan.job").TASK = 128
carry_out, note = Worker.carry_out, Staging.note
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup of whoever runs the tests would keep it away

def stuck(worker, task):
    if task.number >= 6:
        threading.Event().wait()
    return carry_out(worker, task)

def telling(staging, line):
    note(staging, line)
    os.write(1, b"noted\\n")

Worker.carry_out, Staging.note = stuck, telling
main()
"""
"""`ucp` with blocks so small that a small checkpoint is many tasks.

It says when a task is noted as done, and never finishes the seventh.
"""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process have the blocks of `PROGRAM`."""
    shrink(monkeypatch, block=64, task=128)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("workers", "send", "number"),
    [
        (1, os.kill, signal.SIGTERM),
        (2, os.kill, signal.SIGTERM),
        (2, os.killpg, signal.SIGHUP),
    ],
)
def test_a_conversion_that_is_terminated_is_continued(
    ucp: Run,
    zero3: Path,
    tmp_path: Path,
    small_blocks: None,
    workers: int,
    send: Callable[[int, int], None],
    number: int,
) -> None:
    words = ["convert", zero3, tmp_path / "out", "--workers", workers]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, words)], start_new_session=True, **pipes
    ) as process:  # type: ignore[call-overload]
        assert [process.stdout.readline() for _ in range(6)] == ["noted\n"] * 6
        helpers = children(process.pid)
        send(process.pid, number)
        _, said = process.communicate(timeout=60)
    assert said == f"Error: terminated; the same command with --resume continues {tmp_path / 'out'}\n"
    assert process.returncode == 128 + number
    assert len(helpers) == (workers if workers > 1 else 0)
    assert not any(map(is_running, helpers))
    assert not (tmp_path / "out").exists()
    assert json.loads(ucp(*words, "--resume", "--json").stdout)["resumed_bytes"] > 0
    ucp("verify", tmp_path / "out", "--against", zero3)


EARLY = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Signaller(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            del sys.meta_path[0]
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Signaller())
from ucp_cli.main import main
sys.argv[1:2] = []
main()
"""
"""`ucp` that is sent a signal when it is about to import a module."""


@pytest.mark.parametrize("module", ["ucp_cli.verbs", "ucp.api"])
def test_a_signal_while_verbs_are_imported_ends_it_as_any_other(zero3: Path, module: str) -> None:
    words = [sys.executable, "-c", EARLY, module, "inspect", str(zero3)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "Error: terminated\n")


def test_an_interrupt_of_what_is_read_of_the_command_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopping(*_: object, **__: object) -> None:
        raise Terminated(signal.SIGTERM)

    monkeypatch.setattr("click.Group.parse_args", stopping)
    result = CliRunner().invoke(cli, ["inspect", "x"])
    assert (result.exit_code, result.stderr) == (143, "Error: terminated\n")


def test_only_the_first_counts_and_what_is_ignored_stays_so() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        heed_termination()
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        heed_termination()
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
