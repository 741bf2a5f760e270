"""Which notes of parts are taken without a look at the bytes: those that are as good as a plain run's own knowledge.

A plain run does not read back what it wrote: no call of the system failed, and all was synced before the rename. A part
that has come to its end, and synced its files before it said so, knows as much of what it wrote, and of what it read
back because another had noted it. Its note of a task is believed if

1. its journal is sealed: the last line says so, and holds the digest of all lines above;
2. the folder is the one that it wrote to, and nobody but parts was at work there since (`Staging.identity`);
3. every other run that may have touched the bytes is sealed, too, or was over before this one began and looked;
4. the files are there in full length, and no run found that one was lost and made it again, or could not sync one;
5. all that is believed of a task says the same.

Whatever is noted otherwise is read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from ucp.conversion.journal import done_of, fits
from ucp.conversion.parts.journals import PartRun, runs_in
from ucp.conversion.parts.shares import numbered, overlap
from ucp.io.destination.staging import Staging
from ucp.transfer.output_files import is_whole
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import Task
from ucp.transfer.worker import Done

__all__ = ["vouched", "vouches"]


def vouches(run: PartRun, identity: str) -> bool:
    """Whether a run vouches for what it notes, in a folder of this identity."""
    return run.is_sealed and run.identity == identity


def vouched(job: Job, staging: Staging) -> dict[int, Done]:
    """What is believed of the tasks of a job of all tasks, by number."""
    identity, runs = staging.identity(), list(runs_in(staging))
    lost = {path for run in runs for path in run.lost}
    there = {file.path for file in job.target.files if file.path not in lost and is_whole(staging.data, file)}
    tasks = {task.number: task for task in job.tasks if all(fill.path in there for fill in task.fills)}
    found: dict[int, Done] = {}
    differing: set[int] = set()
    for done in _notes(job, runs, identity):
        if done.task in tasks and found.setdefault(done.task, done) != done:
            differing.add(done.task)
    return {
        number: done
        for number, done in found.items()
        if number not in differing and _stands(staging.data, tasks[number], done)
    }


def _notes(job: Job, runs: Sequence[PartRun], identity: str) -> Iterator[Done]:
    """What sealed runs note, but for tasks that a run which is not may have written since they looked."""
    numbers = cache(lambda parts: {task.number: number for task, number in numbered(job, parts)})
    others = [run for run in runs if not vouches(run, identity)]
    for run in runs:
        if not vouches(run, identity):
            continue
        doubted = [own.share for own in others if overlap(run.share, own.share) and own.path.name not in run.over]
        for line in run.lines():
            done = done_of(line)
            if done is not None and not any(numbers(own.parts).get(done.task) == own.number for own in doubted):
                yield done


def _stands(root: Path, task: Task, done: Done) -> bool:
    """Whether a report is of a task as it is planned; an encoded pack, which is a file, is as long as it says."""
    ends = [sum(own.block) for own in done.sums if own.block]
    return fits(task, done) and (not ends or (root / task.fills[0].path).stat().st_size == max(ends))
