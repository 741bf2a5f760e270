from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from ucp.errors import WorkerDiedError
from ucp.testing.engines import EngineContract, _created
from ucp.transfer.engines.processes import ProcessEngine
from ucp.transfer.engines.serial import SerialEngine
from ucp.transfer.worker import Worker


class TestSerialEngine(EngineContract):
    def make(self):
        return SerialEngine()


class TestProcessEngine(EngineContract):
    def make(self):
        return ProcessEngine()

    def test_a_killed_worker_is_an_error(self, job, tmp_path, monkeypatch):
        real = Worker.carry_out

        def carry_out(worker, task):
            if task.number == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(worker, task)

        monkeypatch.setattr(Worker, "carry_out", carry_out)
        with pytest.raises(WorkerDiedError, match=r"signal 9.*--resume"):
            self._run(job, tmp_path / "out", workers=2, threads=1)

    def test_a_worker_that_ends_without_a_word_is_an_error(self, job, tmp_path, monkeypatch):
        monkeypatch.setattr(Worker, "carry_out", lambda worker, task: os._exit(0))
        with pytest.raises(WorkerDiedError, match="12 of 12 tasks"):
            self._run(job, tmp_path / "out", workers=2, threads=1)

    @pytest.mark.parametrize("error", [MemoryError("too much"), ValueError("a defect"), SystemExit(3)])
    def test_an_unforeseen_error_tells_where_it_came_from(self, job, tmp_path, monkeypatch, error):
        def carry_out(worker, task):
            raise error

        monkeypatch.setattr(Worker, "carry_out", carry_out)
        with pytest.raises(WorkerDiedError, match=r"(?s)unexpectedly.*carry_out.*" + type(error).__name__):
            self._run(job, tmp_path / "out", workers=1, threads=2)

    def test_giving_up_leaves_no_process(self, job, tmp_path):
        stream = self.make().run(job, _created(job, tmp_path / "out"), job.tasks, workers=3, threads=2)
        next(stream)
        stream.close()
        assert children() == []

    def test_workers_are_there_at_once_and_end_when_told(self, job, tmp_path, monkeypatch):
        monkeypatch.setattr(Worker, "carry_out", lambda worker, task: threading.Event().wait())
        stream = self.make().run(job, _created(job, tmp_path / "out"), job.tasks, workers=3, threads=2)
        assert len(children()) == 3
        stream.close()
        assert children() == []

    def test_a_worker_that_cannot_be_started_leaves_none(self, job, tmp_path, monkeypatch):
        real, forks = os.fork, []

        def fork():
            if len(forks) == 2:
                raise BlockingIOError("no more processes")
            forks.append(1)
            return real()

        monkeypatch.setattr(os, "fork", fork)
        with pytest.raises(BlockingIOError):
            self._run(job, tmp_path / "out", workers=4)
        assert children() == []

    def test_done_leaves_no_process_and_no_open_file(self, job, tmp_path):
        self._run(job, tmp_path / "warm")
        before = len(os.listdir("/proc/self/fd"))
        self._run(job, tmp_path / "out", workers=4)
        assert children() == []
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_workers_that_are_stuck_end_when_the_parent_is_gone(self, job, tmp_path, monkeypatch):
        """Killed with -9, it cannot tell them; and they would never look."""
        monkeypatch.setattr(Worker, "carry_out", lambda worker, task: threading.Event().wait())
        root = _created(job, tmp_path / "out")
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            _stuck_parent(self.make(), job, root, writing)
        os.close(writing)
        with os.fdopen(reading) as told:
            workers = [int(number) for number in told.readline().split()]
        os.waitpid(pid, 0)
        assert len(workers) == 2
        deadline = time.monotonic() + 10
        while any(_state_of(worker) != "Z" for worker in workers):
            assert time.monotonic() < deadline, "an orphan is stuck"
            time.sleep(0.02)

    def test_workers_end_when_the_parent_is_gone(self, job, tmp_path):
        root = _created(job, tmp_path / "out")
        pid = os.fork()
        if not pid:
            _slow_parent(self.make(), job, root)
        os.waitpid(pid, 0)
        deadline = time.monotonic() + 10
        while any(_is_ours(other, tmp_path) for other in _processes() if other != os.getpid()):
            assert time.monotonic() < deadline, "an orphan goes on working"
            time.sleep(0.02)


def _slow_parent(engine, job, root):
    """Start a run in this (forked) process and die with it half done."""
    stream = iter(engine.run(job, root, job.tasks, workers=2, threads=2))
    next(stream)
    os.kill(os.getpid(), signal.SIGKILL)


def _stuck_parent(engine, job, root, writing):
    """Start workers in this (forked) process, say which they are, and die."""
    stream = engine.run(job, root, job.tasks, workers=2, threads=1)  # dropped, it would end them
    os.write(writing, (" ".join(map(str, children())) + "\n").encode())
    os.kill(os.getpid(), signal.SIGKILL)
    stream.close()


def children() -> list[int]:
    return [pid for pid in _processes() if _parent_of(pid) == os.getpid() and _state_of(pid) != "Z"]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["Z", "-1"]


def _state_of(pid: int) -> str:
    return _stat(pid)[0]


def _parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def _is_ours(pid: int, folder) -> bool:
    """Whether a process holds an open file of the test."""
    try:
        return any(str(folder) in os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False
