"""The body of a Ray task: a batch of the conversion's tasks, carried out by threads of a process on some node.

A batch yields the same reports in the same order every time it runs: Ray repeats a batch whose process was lost, and
skips as many reports as had arrived before. A report takes Ray nearly a millisecond, so a batch of several tasks yields
only one. Tasks are reported as done only when their bytes are on the disk, so that losing the node then loses nothing.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ucp.errors import DestinationError, EngineError, UcpError, WorkerDiedError
from ucp.io.writing import sync
from ucp.transfer.engines.ray.probe import describe_fault, host, program
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done, Step, Worker

Report: TypeAlias = Step | tuple[Done, ...] | Exception
"""A step of a task; or the reports of all tasks of a batch, when these are done; or the error that ended the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayRun:
    """What every batch of a run needs to know."""

    job: Any
    """Reference to the job in Ray's object store."""
    root: Path
    """Folder in which the destination is built."""
    token: Path
    """File that exists while the run goes on: without it, a worker writes nothing."""
    threads: int
    """Number of threads of a worker."""
    program: str
    """Version of ucp on the driver, with the digest of its code."""


_cached_jobs: dict[Path, Job] = {}
"""The job of the last run that this process worked for, by the run's token, so that it is unpacked only once."""


def carry_out(run: RayRun, tasks: Sequence[Task]) -> Iterator[Report]:
    """Carry out `tasks`; the last report says that all are done, or what went wrong."""
    try:
        yield from _reports(run, _get_job(run), tasks)
    except (UcpError, OSError) as error:
        error.add_note(f"on {host()}")
        yield error
    except Exception:  # noqa: BLE001  # reported, and raised again by the driver
        yield WorkerDiedError(f"a worker on {host()} failed unexpectedly:\n{traceback.format_exc()}")


def _get_job(run: RayRun) -> Job:
    """The job of `run`; before it is fetched, checks that this process runs the driver's version of ucp."""
    if run.token not in _cached_jobs:
        import ray

        if program() != run.program:
            raise EngineError(
                f"{host()} has ucp {program()}, and the driver {run.program}; install the same on every node"
            )
        job: Job = ray.get(run.job)
        _cached_jobs.clear()
        _cached_jobs[run.token] = job
    return _cached_jobs[run.token]


def _reports(run: RayRun, job: Job, tasks: Sequence[Task]) -> Iterator[Report]:
    done: list[Done] = []
    for report in _run_tasks(run, job, tasks):
        if isinstance(report, Done):
            done.append(report)
        else:
            yield report
    if job.fsync:
        for path in dict.fromkeys(fill.path for task in tasks for fill in task.fills):
            sync(run.root / path)
    yield tuple(done)


def _run_tasks(run: RayRun, job: Job, tasks: Sequence[Task]) -> Iterator[Step | Done]:
    """Reports of tasks: all reports of a single one; of several, which run in parallel, only the last of each."""
    local = threading.local()
    with ExitStack() as stack:

        def run_task(task: Task) -> Iterator[Step | Done]:
            if not hasattr(local, "worker"):
                local.worker = stack.enter_context(closing(Worker(job, run.root)))
            if fault := describe_fault(str(run.token)):
                raise DestinationError(f"{run.root} cannot be written to on {host()}, or the run is over: {fault}")
            yield from local.worker.carry_out(task)

        if len(tasks) == 1:
            yield from run_task(tasks[0])
            return
        team = stack.enter_context(ThreadPoolExecutor(run.threads))
        yield from team.map(lambda task: list(run_task(task))[-1], tasks)
