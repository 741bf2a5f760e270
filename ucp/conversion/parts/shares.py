"""Which tasks a part is of, however the work is shared out.

>>> overlap(Share(1, 2), Share(2, 4)), overlap(Share(1, 2), Share(3, 4))
(True, False)
"""

from __future__ import annotations

from collections.abc import Iterator

from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import Share, Task

__all__ = ["numbered", "overlap"]


def numbered(job: Job, parts: int) -> Iterator[tuple[Task, int]]:
    """Every task of a job of all tasks, with the number of the part of so many that it is of."""
    start, total = 0, job.nbytes
    for task in job.tasks:
        yield task, Share.at(start, start + task.nbytes, total=total, parts=parts)
        start += task.nbytes


def overlap(one: Share, other: Share) -> bool:
    """Whether a task may be of both."""
    return (one.number - 1) * other.parts < other.number * one.parts and (
        other.number - 1
    ) * one.parts < one.number * other.parts
