"""One part: its share of the tasks, beside whoever does the others.

The files that it writes to are made at their full length, by whichever part comes first; what stands in them beside
tensors is written by whoever finalizes. So parts may begin at the same time, and never undo what another did.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

from ucp.contract.protocols import Observer
from ucp.conversion.destination.disk import taken_up
from ucp.conversion.execute import Written, carry_out_tasks, check_read
from ucp.conversion.journal import Line
from ucp.conversion.options import ConvertOptions
from ucp.conversion.parts.finalize import busy_text
from ucp.conversion.parts.journals import PartJournal, runs_in
from ucp.conversion.prepare import Prepared
from ucp.errors import BusyError, DestinationError
from ucp.io.goal import Making
from ucp.io.staging import Staging
from ucp.transfer.output_files import create
from ucp.transfer.tasks import Share

__all__ = ["write_part"]


def write_part(prepared: Prepared, staging: Staging, options: ConvertOptions, observer: Observer) -> Written | None:
    """Carry out the tasks of a part that are not done; None where the destination is complete.

    Raises DestinationError where something is in the way, CorruptError and ReplicaError where the source is not what it
    should be.
    """
    before = _joined(prepared, staging, options)
    if before is None:
        staging.release()
        staging.sweep()
        return None
    with closing(PartJournal(staging, options.part or Share())) as journal:
        threads = prepared.workers * prepared.threads
        own = _own(prepared, staging, before)
        begun = taken_up(prepared.job, staging.data, own, observer=observer, threads=threads)
        filled = {fill.path for task in prepared.job.tasks for fill in task.fills}
        for file in prepared.job.target.files:
            if file.path in filled:
                create(staging.data, replace(file, literals=()), afresh=False)
        written = carry_out_tasks(prepared, journal, begun, observer)
        check_read(prepared.job.index, written)
        if options.fsync:
            _sync(staging.data / path for path in filled)
        journal.end(fsync=options.fsync)
    return written


def _joined(prepared: Prepared, staging: Staging, options: ConvertOptions) -> Iterable[Line] | None:
    """What was noted outside of parts, once the place is taken; None where the destination is complete."""
    if staging.is_complete(prepared.fingerprint):
        return None
    try:
        before = staging.join(Making(prepared.fingerprint, prepared.facts), overwrite=options.overwrite)
    except BusyError as error:
        raise BusyError(busy_text(error, staging)) from error
    except DestinationError:
        if staging.is_complete(prepared.fingerprint):  # finalized since we looked
            return None
        raise
    return None if staging.is_complete(prepared.fingerprint) else before


def _own(prepared: Prepared, staging: Staging, before: Iterable[Line]) -> Iterator[Line]:
    """What any run noted of the tasks of this part, however the work was shared out then."""
    own = {task.number for task in prepared.job.tasks}
    for lines in chain([before], (run.lines for run in runs_in(staging))):
        for line in lines:
            number = line.get("task")
            if isinstance(number, int) and number in own:
                yield line


def _sync(paths: Iterable[Path]) -> None:
    """Wait until files are on the disk: on the machine that wrote them, as no other can."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
