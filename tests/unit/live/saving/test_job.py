"""Background saves: what they hold, how they end, and that one is written at a time."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import ucp
from tests.unit.live.threads import ThreadRanks
from tests.unit.live.threads import run as run_threads
from ucp.errors import DestinationError
from ucp.saving.part import write_part


def make_model(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    nn.init.zeros_(model.bias)
    return model


def test_a_background_save_holds_what_was_there_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, extras, may_write = make_model(1), {"seen": [1]}, threading.Event()

    def write_later(*arguments: object) -> int:
        may_write.wait(60)
        return write_part(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("ucp.saving.job.write_part", write_later)
    handle = ucp.save(model, None, None, tmp_path / "run", extras=extras, asynchronous=True)
    assert isinstance(handle, ucp.SaveHandle)
    nn.init.constant_(model.weight, 2)
    extras["seen"].append(2)
    assert not handle.is_written
    assert not (tmp_path / "run").exists()
    may_write.set()
    report = handle.wait()
    assert handle.is_written
    assert handle.wait() is report
    checkpoint = ucp.open(report.path)
    assert torch.all(checkpoint.read("weight") == 1)
    assert checkpoint.extra("seen") == [1]
    assert ucp.verify(report.path).ok


def test_the_next_save_waits_and_raises_what_made_the_last_one_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        ucp.save(make_model(step), None, None, tmp_path / f"step{step}", step=step, chain=True, asynchronous=True)
    assert ucp.save(make_model(3), None, None, tmp_path / "step3", step=3, chain=True).step == 3
    assert ucp.open(tmp_path, at=2).read("weight")[0, 0].item() == 2

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr("ucp.saving.part.write_at", fail)
        handle = ucp.save(make_model(4), None, None, tmp_path / "step4", step=4, chain=True, asynchronous=True)
        with pytest.raises(OSError, match=str(errno.ENOSPC)):
            ucp.save(make_model(5), None, None, tmp_path / "step5", step=5, chain=True)
    with pytest.raises(OSError, match=str(errno.ENOSPC)):
        handle.wait()
    assert ucp.open(tmp_path).step == 3
    ucp.save(make_model(4), None, None, tmp_path / "step4", step=4, chain=True)
    assert ucp.open(tmp_path).step == 4


def test_ranks_meet_in_the_folder_of_the_save(tmp_path: Path) -> None:
    def save(ranks: ThreadRanks) -> ucp.SaveReport:
        model = make_model(1)
        handle = ucp.save(model, None, "dp=3", tmp_path / "run", process_group=ranks, asynchronous=True)
        return handle.wait()

    reports = run_threads(3, save)
    assert all(isinstance(report, ucp.SaveReport) for report in reports)
    assert ucp.verify(tmp_path / "run").ok


def test_all_ranks_raise_what_made_one_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_but_on_rank_1(root: Path, rank: int, *arguments: object) -> int:
        if rank == 1:
            raise DestinationError("7 bytes are free")
        return write_part(root, rank, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("ucp.saving.job.write_part", write_but_on_rank_1)

    def save(ranks: ThreadRanks) -> ucp.SaveReport:
        handle = ucp.save(make_model(1), None, "dp=2", tmp_path / "run", process_group=ranks, asynchronous=True)
        return handle.wait()

    for error in run_threads(2, save):
        assert isinstance(error, DestinationError)
        assert "7 bytes" in str(error)
    assert not (tmp_path / "run").exists()


def test_a_rank_that_writes_nothing_more_is_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_on_rank_0(root: Path, rank: int, *arguments: object) -> int:
        return 0 if rank else write_part(root, rank, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("ucp.saving.job.write_part", write_on_rank_0)
    monkeypatch.setattr("ucp.saving.job._IDLE_SECONDS", 0.3)

    def save(ranks: ThreadRanks) -> ucp.SaveReport:
        handle = ucp.save(make_model(1), None, "dp=2", tmp_path / "run", process_group=ranks, asynchronous=True)
        return handle.wait()

    for error in run_threads(2, save):
        assert isinstance(error, DestinationError)
        assert "[1]" in str(error)
    assert not (tmp_path / "run").exists()


SCRIPT = """
import sys, time
import torch
import ucp, ucp.saving.job as job
from ucp.saving.part import write_part

class Alone:
    '''Rank 0 of a run whose other rank has died.'''
    rank, count, device = 0, int(sys.argv[2]), torch.device("cpu")
    def share(self, value): return [value] * self.count
    def swap(self, parts): raise AssertionError
    def gather(self, part, gathered, members): raise AssertionError

def write_late(*arguments):
    time.sleep(0.5)
    return write_part(*arguments)

job.write_part, job._IDLE_AT_EXIT = write_late, 1.0
ucp.save(torch.nn.Linear(2, 2), None, f"dp={sys.argv[2]}", sys.argv[1], process_group=Alone(), asynchronous=True)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_that_does_not_wait_ends_with_a_store_or_with_an_error(ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(ranks)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (tmp_path / "run").exists() is (ranks == 1), finished.stderr
    assert ("DestinationError" in finished.stderr) is (ranks == 2), finished.stderr
