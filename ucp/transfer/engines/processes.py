"""Runs tasks in processes of this machine, with threads in each so that I/O overlaps.

A free worker takes the next task. Tasks are about equal in bytes (`ucp.transfer.plan.tasks.TASK`), so all workers end
at about the same time. Workers end when the parent process ends, for whatever reason. They are forked before this
process starts threads (those of an earlier stage have been joined), and ignore the signals that end the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucp.contract.protocols import Engine
from ucp.errors import UcpError, WorkerDiedError, format_count
from ucp.io.files import close_connections
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.task_list import pick_tasks
from ucp.transfer.plan.tasks import Task, interleave
from ucp.transfer.worker import Done, Step, Worker

if TYPE_CHECKING:
    from multiprocess.connection import Connection

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run. The whole process group gets them from a terminal or scheduler; only the parent acts."""


_PR_SET_PDEATHSIG = 1
"""Option of prctl(2) (linux/prctl.h)."""


class ProcessEngine(Engine):
    """`workers` processes of `threads` threads each."""

    name = "processes"
    summary = "processes of this machine"

    def run(
        self, job: Job, root: Path, tasks: Sequence[Task], *, workers: int, threads: int
    ) -> Generator[Done | Step, None, None]:
        """Reports of `tasks`, in the order in which they finish.

        All workers are forked when this returns, so the caller may start threads then, but not before.
        """
        # writers of the same file wait for one another, so neighbours in the order write different files
        order = interleave(range(len(tasks)), key=lambda at: tasks[at].fills[0].path)
        in_turn = pick_tasks(tasks, order)
        pool: dict[Any, Any] = {}
        close_connections()
        try:
            with undisturbed():
                _start(pool, job, root, in_turn, workers=workers, threads=threads)
            reports = _reports(pool, len(tasks))
            next(reports)
        except BaseException:
            _stop(pool)
            raise
        return reports


@contextlib.contextmanager
def undisturbed() -> Generator[None, None, None]:
    """Defer signals that end a run until every worker is registered in the pool and ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(pool: dict[Any, Any], job: Job, root: Path, tasks: Sequence[Task], *, workers: int, threads: int) -> None:
    """Start workers; `pool`: filled with each worker, by the receiving end of the pipe that it reports through."""
    import multiprocess  # not the standard module: dill also sends what a plug-in defines in a function or a notebook

    context = multiprocess.get_context("fork" if hasattr(os, "fork") else "spawn")
    queue = context.Value("q", 0)
    for _ in range(max(1, min(workers, len(tasks)))):
        receiver, sender = context.Pipe(duplex=False)
        shared = {"queue": queue, "threads": threads, "sender": sender, "parent": os.getpid()}
        process = context.Process(target=_serve, args=(job, root, tasks), kwargs=shared, daemon=True)
        process.start()
        sender.close()
        pool[receiver] = process


def _stop(pool: dict[Any, Any]) -> None:
    for receiver, process in pool.items():
        process.kill()
        process.join()
        receiver.close()


def _reports(pool: dict[Any, Any], expected: int) -> Generator[Any, None, None]:
    """Yield None once, then the workers' reports. Closing the generator ends the workers at any time."""
    from multiprocess import connection

    live, missing = dict(pool), expected
    try:
        yield None
        while live:
            ready: list[Any] = connection.wait(list(live))
            for receiver in ready:
                try:
                    message = receiver.recv()
                except EOFError:
                    _check_end(live.pop(receiver))
                    continue
                if isinstance(message, BaseException):
                    raise message
                missing -= isinstance(message, Done)
                yield message
        if missing:
            raise WorkerDiedError(
                f"no worker reported {missing} of {format_count(expected, 'task')}; try again with --resume"
            )
    finally:
        _stop(pool)


def _check_end(process: Any) -> None:
    process.join()
    if process.exitcode:
        how = f"killed by signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
        raise WorkerDiedError(
            f"a worker process ended early ({how}); the machine may be out of memory. "
            "Try again with --resume and fewer --workers"
        )


def as_worker(parent: int) -> None:
    """Make this process end with its parent, and ignore the signals that end a run."""
    if sys.platform == "linux":  # elsewhere a worker ends after its task
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)


def _serve(
    job: Job, root: Path, tasks: Sequence[Task], *, queue: Any, threads: int, sender: Connection, parent: int
) -> None:
    """Body of a worker process; `parent`: id of the process that it works for, and ends with."""
    as_worker(parent)
    lock = threading.Lock()

    def take() -> Task | None:
        with queue.get_lock():
            position = queue.value
            queue.value = position + 1
        return tasks[position] if position < len(tasks) and os.getppid() == parent else None

    def send(message: Done | Step | BaseException) -> None:
        with lock, contextlib.suppress(BrokenPipeError):  # the parent has ended
            sender.send(message)

    def serve() -> None:
        worker = Worker(job, root)
        try:
            for report in worker.carry_out_all(iter(take, None)):
                send(report)
        except (UcpError, OSError) as error:
            send(error)
        except BaseException:  # noqa: BLE001  # reported, and raised again by the parent
            send(WorkerDiedError(f"a worker failed unexpectedly:\n{traceback.format_exc()}"))
        finally:
            worker.close()

    team = [threading.Thread(target=serve) for _ in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    sender.close()
    os._exit(0)  # a normal exit fails if a thread of a ThreadPoolExecutor forked this process: Python joins that thread
