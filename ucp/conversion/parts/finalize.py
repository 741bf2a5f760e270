"""Finishes a conversion in parts: finds the tasks that the parts' journals report, and those that are missing.

A conversion without parts does not read back what it wrote: no system call failed, and all files were synced before the
rename. A part that synced its files and then ended is as reliable. So a task is trusted from a part's journal, without
reading its bytes, if

1. the journal is sealed: its last line has the digest of all lines above;
2. the folder is the one that the part wrote to, and only parts have worked there since (`Staging.identity`);
3. every other run that may have written the same bytes is sealed, or had ended before this part began;
4. the files have their full length, and no run reported a file as lost, made again, or not synced;
5. all trusted reports of the task agree.

All other reported tasks are read back and compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from ucp.conversion.destination.staging import Staging
from ucp.conversion.journal import is_report_of, parse_done
from ucp.conversion.parts.journals import PartRun, is_running, list_runs
from ucp.errors import BusyError, UnfinishedError, format_count, format_list
from ucp.transfer.output_files import has_full_length
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import Share, Task
from ucp.transfer.worker import Done

_MOST_NAMED = 20
"""Most parts that the suggested command names."""


def check_started(job: Job, staging: Staging) -> None:
    """Raise UnfinishedError if there is work and no part was ever run."""
    if job.tasks and not staging.folder.exists():
        raise UnfinishedError(
            f"nothing of the conversion to {staging.dst} is there to finalize: first run its parts, the same command "
            "with --part 1/N, ... --part N/N in place of --finalize"
        )


def describe_busy(error: BusyError, staging: Staging) -> str:
    """The message of `error`, with the parts that are running, if any are."""
    running = [f"part {run.share} on {run.where}" for run in list_runs(staging) if is_running(run)]
    if not running:
        return str(error)
    return (
        f"{format_count(len(running), 'part')} of the conversion to {staging.dst} still "
        f"{'runs' if len(running) == 1 else 'run'}:\n{format_list(running)}\nwait for them, or end them, and try again"
    )


def make_unfinished_error(job: Job, staging: Staging, todo: Sequence[Task]) -> UnfinishedError:
    """The error that says what is missing (tasks, bytes, and their parts), and what to run."""
    runs = list(list_runs(staging))
    head = (
        f"{len(todo):,} of {format_count(len(job.tasks), 'task')} ({sum(task.nbytes for task in todo):,} of "
        f"{job.nbytes:,} bytes) of the conversion to {staging.dst} are missing"
    )
    if not runs:
        return UnfinishedError(f"{head}. Run the same command with --resume in place of --finalize, or its parts")
    parts, _ = max(Counter({run.share: run.share.parts for run in runs}.values()).items(), key=lambda pair: pair[::-1])
    todo_numbers, missing = {task.number for task in todo}, dict[Share, list[Task]]()
    for task, number in _number_tasks(job, parts):
        if task.number in todo_numbers:
            missing.setdefault(Share(number, parts), []).append(task)
    lines = [
        f"part {share}: {format_count(len(tasks), 'task')} of {sum(task.nbytes for task in tasks):,} bytes; "
        f"{_explain_missing(share, runs)}"
        for share, tasks in missing.items()
    ]
    again = [f"--part {share}" for share in missing][:_MOST_NAMED]
    more = ", ..." if len(missing) > len(again) else ""
    return UnfinishedError(
        f"{head}:\n{format_list(lines)}\nrun the same command with {', '.join(again)}{more} in place of --finalize, "
        "then finalize again"
    )


def _explain_missing(share: Share, runs: Sequence[PartRun]) -> str:
    """Why tasks of a part may be missing."""
    part_runs = [run for run in runs if run.share == share]
    if not part_runs:
        return "it was never run"
    if any(run.has_ended for run in part_runs):
        return "it ran to its end, but its files no longer hold what it wrote"
    return f"it was cut off on {', '.join(run.where for run in part_runs)}"


def find_trusted(job: Job, staging: Staging) -> dict[int, Done]:
    """Reports of the tasks that are trusted from the parts' journals, by task number."""
    identity, runs = staging.identity(), list(list_runs(staging))
    lost = {path for run in runs for path in run.lost}
    paths = {file.path for file in job.target.files if file.path not in lost and has_full_length(staging.data, file)}
    tasks = {task.number: task for task in job.tasks if all(fill.path in paths for fill in task.fills)}
    reports: dict[int, Done] = {}
    differing: set[int] = set()
    for done in _read_notes(job, runs, identity):
        if done.task in tasks and reports.setdefault(done.task, done) != done:
            differing.add(done.task)
    return {
        number: done
        for number, done in reports.items()
        if number not in differing
        and is_report_of(tasks[number], done)
        and _has_planned_length(staging.data, tasks[number], done)
    }


def _read_notes(job: Job, runs: Sequence[PartRun], identity: str) -> Iterator[Done]:
    """Reports of sealed runs, without tasks that an unsealed run may have written after the sealed run began."""
    numbers = cache(lambda parts: {task.number: number for task, number in _number_tasks(job, parts)})
    others = [run for run in runs if not run.is_trusted_in(identity)]
    for run in (run for run in runs if run.is_trusted_in(identity)):
        doubted = [
            other.share
            for other in others
            if run.share.overlaps(other.share) and other.path.name not in run.finished_before
        ]
        for line in run.read_lines():
            done = parse_done(line)
            if done is not None and not any(numbers(other.parts).get(done.task) == other.number for other in doubted):
                yield done


def _has_planned_length(root: Path, task: Task, done: Done) -> bool:
    """Whether a file of encoded blocks ends where its last block ends; True for other files."""
    ends = [sum(section_sum.block) for section_sum in done.sums if section_sum.block]
    return not ends or (root / task.fills[0].path).stat().st_size == max(ends)


def _number_tasks(job: Job, parts: int) -> Iterator[tuple[Task, int]]:
    """Every task of a job with all tasks, and the number of its part, if there are `parts` parts."""
    start, total = 0, job.nbytes
    for task in job.tasks:
        yield task, Share.find_part(start, start + task.nbytes, total=total, parts=parts)
        start += task.nbytes
