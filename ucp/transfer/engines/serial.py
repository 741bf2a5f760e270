"""Runs all tasks in this process, one after another: for tests, debuggers and very little memory."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

from ucp.contract.protocols import Engine
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done, Step, Worker


class SerialEngine(Engine):
    """One process with one thread; ignores `workers` and `threads`."""

    name = "serial"
    summary = "this process, one task after another"

    def run(
        self, job: Job, root: Path, tasks: Sequence[Task], *, workers: int, threads: int
    ) -> Generator[Done | Step, None, None]:
        """Reports of `tasks`, in order."""
        worker = Worker(job, root)
        try:
            yield from worker.carry_out_all(tasks)
        finally:
            worker.close()
