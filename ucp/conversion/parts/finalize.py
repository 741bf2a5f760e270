"""What is missing of a conversion in parts: which of them are to be run, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ucp.conversion.parts.journals import PartRun, is_running, runs_in
from ucp.conversion.parts.shares import numbered
from ucp.conversion.prepare import Prepared
from ucp.errors import BusyError, UnfinishedError, counted, listed
from ucp.io.destination.staging import Staging
from ucp.transfer.plan.tasks import Share, Task

__all__ = ["busy_text", "check_begun", "unfinished"]

_MOST_NAMED = 20
"""Parts that a command line names."""


def check_begun(prepared: Prepared, staging: Staging) -> None:
    """Raise UnfinishedError where there is work, and no part of it was ever run."""
    if prepared.job.tasks and not staging.folder.exists():
        raise UnfinishedError(
            f"nothing of the conversion to {staging.dst} is there to finalize: first run its parts, the same command "
            "with --part 1/N, ... --part N/N in place of --finalize"
        )


def busy_text(error: BusyError, staging: Staging) -> str:
    """Who is at work there: the parts that are running, if any are."""
    running = [f"part {run.share} on {run.where}" for run in runs_in(staging) if is_running(run)]
    if not running:
        return str(error)
    return (
        f"{counted(len(running), 'part is', 'parts are')} running of the conversion to {staging.dst}:\n"
        f"{listed(running)}\nwait for them, or end them, and try again"
    )


def unfinished(prepared: Prepared, staging: Staging, todo: Sequence[Task]) -> UnfinishedError:
    """The error that says what is missing: tasks, bytes, the parts that they are of, and what to run."""
    runs = list(runs_in(staging))
    job = prepared.job
    head = (
        f"{len(todo):,} of {counted(len(job.tasks), 'task')} ({sum(task.nbytes for task in todo):,} of {job.nbytes:,} "
        f"bytes) of the conversion to {staging.dst} are missing"
    )
    if not runs:
        return UnfinishedError(f"{head}. Run the same command with --resume in place of --finalize, or its parts")
    parts, _ = max(Counter({run.share: run.share.parts for run in runs}.values()).items(), key=lambda own: own[::-1])
    missing = _by_part(prepared, todo, parts)
    lines = [f"part {share}: {_amount(tasks)}; {_what_became(share, runs)}" for share, tasks in missing.items()]
    again = [f"--part {share}" for share in missing][:_MOST_NAMED]
    more = ", ..." if len(missing) > len(again) else ""
    return UnfinishedError(
        f"{head}:\n{listed(lines)}\nrun the same command with {', '.join(again)}{more} in place of --finalize, then "
        "finalize again"
    )


def _by_part(prepared: Prepared, todo: Sequence[Task], parts: int) -> dict[Share, list[Task]]:
    """Tasks by the part of so many that they are of, in order."""
    left = {task.number for task in todo}
    found: dict[Share, list[Task]] = {}
    for task, number in numbered(prepared.job, parts):
        if task.number in left:
            found.setdefault(Share(number, parts), []).append(task)
    return found


def _amount(tasks: Sequence[Task]) -> str:
    return f"{counted(len(tasks), 'task')} of {sum(task.nbytes for task in tasks):,} bytes"


def _what_became(share: Share, runs: Sequence[PartRun]) -> str:
    """Why tasks of a part may be missing."""
    own = [run for run in runs if run.share == share]
    if not own:
        return "it was never run"
    if any(run.has_ended for run in own):
        return "it was run to its end, and bytes are not there as it noted"
    return f"it was cut off on {', '.join(run.where for run in own)}"
