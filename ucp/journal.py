"""What an earlier run of the same conversion finished, as far as its bytes are really there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash

from ucp.gather import Span
from ucp.plan import Job, Task
from ucp.union import Done, Sum

__all__ = ["line_of", "trusted"]

Line = dict[str, object]


def line_of(done: Done) -> Line:
    """The journal line of a finished task."""
    return {"task": done.task, "sums": done.sums, "spans": done.spans, "drift": done.drift}


def trusted(job: Job, root: Path, lines: Sequence[Line]) -> dict[int, Done]:
    """Finished tasks whose bytes are there as they were reported, by number; anything else is to be done again."""
    found: dict[int, Done] = {}
    for line in lines:
        done = _done(line)
        if done is not None and done.task < len(job.tasks) and _stands(root, job.tasks[done.task], done):
            found[done.task] = done
    return found


def _done(line: Line) -> Done | None:
    """The report that `line_of` was given; None when the line says something else."""
    match line:
        case {"task": int(task), "sums": list(sums), "spans": list(spans), "drift": list(drift)}:
            try:
                return Done(
                    task=task,
                    sums=tuple(Sum(*own[:-1], block=own[-1] and tuple(own[-1])) for own in sums),
                    spans=tuple(Span(*own) for own in spans),
                    drift=tuple(drift),
                )
            except (IndexError, TypeError):
                return None
    return None


def _stands(root: Path, task: Task, done: Done) -> bool:
    sections = [(fill.path, section) for fill in task.fills for section in fill.sections]
    if len(sections) != len(done.sums):
        return False
    try:
        for (path, section), own in zip(sections, done.sums, strict=True):
            offset, nbytes = own.block or (section.offset, section.nbytes)
            with (root / path).open("rb") as file:
                file.seek(offset)
                data = file.read(nbytes)
            # An encoded block is checked by its length only here: its own checksum is checked whenever it is decoded.
            if len(data) != nbytes or (own.block is None and xxhash.xxh3_64_hexdigest(data) != own.digest):
                return False
    except OSError:
        return False
    return True
