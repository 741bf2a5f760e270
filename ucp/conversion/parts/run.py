"""Carries out one part of a conversion: its share of the tasks, while other runs do the other parts.

The first part that writes to a file creates it at its full length; what a file holds besides tensors is written by
`--finalize`. So parts may start at the same time, and never undo each other's work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from ucp.contract.protocols import Observer
from ucp.conversion.destination.disk import resume
from ucp.conversion.destination.existing import ConversionId
from ucp.conversion.destination.protocol import show_waiting
from ucp.conversion.destination.staging import Staging
from ucp.conversion.execute import Written, carry_out_tasks, check_read
from ucp.conversion.journal import Line
from ucp.conversion.options import ConvertOptions
from ucp.conversion.parts.finalize import describe_busy
from ucp.conversion.parts.journals import PartJournal, is_running, list_runs
from ucp.conversion.prepare import Prepared
from ucp.errors import BusyError, DestinationError
from ucp.io.provenance import is_complete
from ucp.io.writing import check_space, sync
from ucp.transfer.output_files import create_file, has_full_length
from ucp.transfer.plan.tasks import Share


def write_part(prepared: Prepared, staging: Staging, options: ConvertOptions, observer: Observer) -> Written | None:
    """Carry out the tasks of a part that are not done; None if the destination is already complete.

    Raises DestinationError if something else is there, CorruptError or ReplicaError if the source is not what it should
    be.
    """
    before = _join_conversion(prepared, staging, options, observer)
    if before is None:
        staging.release()
        staging.cleanup()
        return None
    share, identity = options.part or Share(), staging.identity()
    unsealed = [run for run in list_runs(staging) if run.share.overlaps(share) and not run.is_trusted_in(identity)]
    over = [run.path.name for run in unsealed if not is_running(run)]  # this run checks what they wrote
    with closing(PartJournal(staging, share, over=over)) as journal:
        filled = _make_files(prepared, staging, journal)
        threads = prepared.workers * prepared.threads
        numbers = {task.number for task in prepared.job.tasks}
        noted = (  # by any run, whatever its number of parts
            line
            for lines in chain([before], (run.read_lines() for run in list_runs(staging)))
            for line in lines
            if isinstance(number := line.get("task"), int) and number in numbers
        )
        resume_point = resume(prepared.job, staging.data, noted, observer=observer, threads=threads)
        for done in resume_point.done:  # by another run, and read back here
            journal.note(done)
        written = carry_out_tasks(prepared, journal, resume_point, observer)
        check_read(prepared.job.index, written)
        if options.fsync:
            _sync(staging.data, filled, journal)
        journal.end(fsync=options.fsync)
    return written


def _join_conversion(
    prepared: Prepared, staging: Staging, options: ConvertOptions, observer: Observer
) -> Iterable[Line] | None:
    """Lock the destination. Returns the journal of runs without --part; None if the destination is complete."""
    if is_complete(staging.dst, prepared.fingerprint, overwrite=options.overwrite):
        return None
    if not staging.data.exists():
        check_space(prepared.nbytes_out, staging.dst.parent)  # for all parts; only the first one checks
    try:
        conversion, waiting = ConversionId(prepared.fingerprint, prepared.facts), partial(show_waiting, observer)
        before = staging.join(conversion, overwrite=options.overwrite, waiting=waiting)
    except BusyError as error:
        raise BusyError(describe_busy(error, staging)) from error
    except DestinationError:
        if is_complete(staging.dst, prepared.fingerprint, overwrite=options.overwrite):  # finalized since we looked
            return None
        raise
    return None if is_complete(staging.dst, prepared.fingerprint, overwrite=options.overwrite) else before


def _make_files(prepared: Prepared, staging: Staging, journal: PartJournal) -> list[str]:
    """Create the missing files among those that the tasks write to. Returns the paths of all of them.

    Notes of other runs are read before the files are looked at: so a noted file that is missing was lost meanwhile.
    """
    filled = {fill.path for task in prepared.job.tasks for fill in task.fills}
    files = [file for file in prepared.job.target.files if file.path in filled]
    known = {path for run in list_runs(staging) for path in run.files}
    lost = [file.path for file in files if file.path in known and not has_full_length(staging.data, file)]
    if lost:
        journal.lose(lost)
    for file in files:
        create_file(staging.data, replace(file, literals=()), afresh=False)
    journal.begin([file.path for file in files])
    return [file.path for file in files]


def _sync(root: Path, paths: Sequence[str], journal: PartJournal) -> None:
    """Wait until files are on the disk. Only the machine that wrote them can do this."""
    for path in paths:
        try:
            sync(root / path)
        except OSError:
            journal.lose([path])  # the system reports it only once: bytes of another part may be lost, too
            raise
    folders = {folder for path in paths for folder in (root / path).parents if folder.is_relative_to(root)}
    for folder in sorted(folders, reverse=True):
        sync(folder)
