"""A conversion from end to end: prepare, execute, verify, commit.

1. `prepare` reads the source's index, proves that its shards tile every tensor, lets the target plan its files, and
   plans the work;
2. `execute` has an engine write them beside the destination, with a journal, and compares recorded checksums of
   everything read;
3. `verify_written` reads the files back, if asked;
4. `commit` is one rename, which puts the destination in place.

In parts (`ucp.conversion.parts`) each does its share of 2; whoever finalizes does the rest.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from ucp.contract.output_names import check_fits
from ucp.contract.protocols import Observer
from ucp.conversion.execute import Written, execute, take_up
from ucp.conversion.journal import Line
from ucp.conversion.options import ConvertOptions
from ucp.conversion.parts.finalize import busy_text, check_begun, unfinished
from ucp.conversion.parts.journals import runs_in
from ucp.conversion.parts.planning import plan_part
from ucp.conversion.parts.run import write_part
from ucp.conversion.prepare import Prepared, prepare
from ucp.conversion.verify import verify_written
from ucp.core.topology import Topology
from ucp.errors import BusyError, ChangedError, CorruptError, DestinationError, ReplicaError, UsageError, counted
from ucp.io.staging import Making, Staging, check_apart, check_destination
from ucp.transfer.compare import fit_threads
from ucp.transfer.tasks import Job

__all__ = ["ConvertReport", "carry_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did."""

    dst: str
    """Destination."""
    format: str
    """Format of the source."""
    to: str
    """Target."""
    topology: Topology | None
    """Layout of the run that loads what was written; None where it fits any."""
    layout: str
    """Variant of the target's layout; empty for its usual one."""
    atoms: int
    """Parameters and buffers; of a part, those that its share of the work is of."""
    nbytes_written: int
    """Bytes of tensors written by this run, before compression."""
    nbytes_out: int
    """Bytes of the files that hold them and of those beside; 0 when there was nothing to do."""
    files_out: int
    """How many files these are."""
    nbytes_last: int
    """Bytes of the files that are written last and say what the others hold."""
    files_last: int
    """How many files these are."""
    references: int
    """Pieces in files of the source that a virtual destination refers to; 0 for any other."""
    resumed_bytes: int
    """Bytes that an earlier run had already written."""
    already_complete: bool
    """Whether there was nothing to do."""
    checked_bytes: int
    """Source bytes compared with checksums that the writer recorded."""
    unchecked_files: tuple[str, ...]
    """Source files read from that carry no checksums."""
    copies_checked: int
    """States of which the source held copies (replicas, the model's own weights) that were compared."""
    warnings: tuple[str, ...]
    """What keeps a run from resuming as it would from the source."""
    casts: tuple[str, ...]
    """Changes of dtype."""
    notes: tuple[str, ...]
    """What was assumed, and what the target cannot hold."""
    dropped: tuple[str, ...]
    """What was not carried over, with the reasons."""
    part: str = ""
    """Which part this was, such as "3/8"; empty for all. Files and copies are counted by whoever finalizes."""

    def __str__(self) -> str:
        what = ", ".join(filter(None, [self.to, self.layout, str(self.topology or "")]))
        refers = f"{counted(self.references, 'reference')} into the source, nothing copied"
        copied = f"{self.nbytes_written:,} bytes of tensors written"
        files = f"{counted(self.files_out, 'file')} of {self.nbytes_out:,} bytes"
        last = f"{counted(self.files_last, 'file')} of {self.nbytes_last:,} bytes"
        copies = f"{counted(self.copies_checked, 'state')} against copies"
        text = [f"{self.dst} ({what}), from {self.format}: {counted(self.atoms, 'parameter')}"]
        if self.already_complete:
            text.append("already complete: nothing was written")
        elif self.part:
            text.append(f"part {self.part}: {copied}, {self.resumed_bytes:,} before; --finalize when all are done")
        else:
            text.append(f"{refers if self.references else copied}; {files}, and the index: {last}")
            text.append(f"{self.checked_bytes:,} bytes of the source checked against checksums, {copies}")
        told = {"warning": self.warnings, "cast": self.casts, "note": self.notes, "dropped": self.dropped}
        return "\n".join([*text, *(f"{kind}: {line}" for kind, lines in told.items() for line in lines)])


def carry_out(src: Path, dst: Path, options: ConvertOptions, observer: Observer) -> ConvertReport:
    """Convert `src` to `dst`. Raises UcpError; then `dst` is as it was."""
    nul = next((own for own in (src, dst) if "\0" in str(own)), None)
    if nul is not None:
        raise UsageError(f"expected paths without the character NUL, which ends one; got {str(nul)!r}")
    staging = Staging(dst.resolve())
    check_fits(staging.data, ())
    check_destination(src, dst)
    threads = fit_threads(options.memory) if options.verify else 0
    if options.part is not None:
        prepared = plan_part(src, staging, options, observer, partial(_check_shared_place, staging))
        return _report(prepared, dst, options, _part(prepared, staging, options, observer))
    prepared = prepare(src, options, observer)
    _check_place(staging, prepared)
    journal = _taken(staging, prepared, options)
    if journal is None:
        return _report(prepared, dst, options, None)
    with _released(staging):
        written, todo = take_up(prepared, staging.data, journal, observer)
        if options.finalize and todo:
            raise unfinished(prepared, staging, todo)
        execute(prepared, staging, written, todo, observer)
        if options.verify:
            verify_written(prepared.job, staging.data, source=options.source, observer=observer, threads=threads)
        staging.commit(fsync=options.fsync)
    return _report(prepared, dst, options, written)


def _check_place(staging: Staging, prepared: Prepared) -> None:
    """Raise DestinationError where the destination would be in the way of the source, or does not fit its place."""
    check_apart(staging.dst, prepared.job.index.path, (file.path for file in prepared.job.index.files))
    check_fits(staging.data, (file.path for file in prepared.job.target.files))


def _check_shared_place(staging: Staging, prepared: Prepared) -> None:
    """The same of a place that several parts fill: whoever comes first looks for room for all of them."""
    _check_place(staging, prepared)
    if not staging.data.exists() and not staging.is_complete(prepared.fingerprint):
        _check_space(prepared, staging.dst.parent)


def _part(prepared: Prepared, staging: Staging, options: ConvertOptions, observer: Observer) -> Written | None:
    """Write a part, beside others; what was written, or None where the destination is complete."""
    try:
        return write_part(prepared, staging, options, observer)
    except OSError as error:
        raise _unwritable(staging.folder, error) from error
    finally:
        staging.release()


def _taken(staging: Staging, prepared: Prepared, options: ConvertOptions) -> Iterable[Line] | None:
    """Take the place where the destination grows; what earlier runs did there, or None where nothing is left to do.

    Raises DestinationError.
    """
    resume = options.resume or options.finalize
    if resume and staging.is_complete(prepared.fingerprint):
        staging.sweep()
        return None
    if options.finalize:
        check_begun(prepared, staging)
    if not staging.folder.exists():
        _check_space(prepared, staging.dst.parent)
    try:
        making = Making(prepared.fingerprint, prepared.facts)
        journal = staging.open(making, resume=resume, overwrite=options.overwrite)
        return chain(journal, chain.from_iterable(run.lines for run in runs_in(staging)))
    except OSError as error:
        raise _unwritable(staging.folder, error) from error
    except BusyError as error:
        raise BusyError(busy_text(error, staging)) from error
    except DestinationError:
        if resume and staging.is_complete(prepared.fingerprint):  # by another run, which this one waited for
            staging.sweep()
            return None
        raise


@contextmanager
def _released(staging: Staging) -> Iterator[None]:
    """Let go of the place when something fails; tasks that were done stay for --resume, unless they are wrong."""
    try:
        yield
    except OSError as error:
        staging.give_up()
        raise _unwritable(staging.folder, error) from error
    except (ChangedError, CorruptError, ReplicaError):
        staging.discard()
        raise
    except BaseException:
        staging.give_up()
        raise


def _unwritable(folder: Path, error: OSError) -> DestinationError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "no space is left; free some, then continue with --resume"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what = f"{error.strerror}; check the permissions, then continue with --resume"
    else:
        what = f"{error.strerror or error}; when that is put right, continue with --resume"
    return DestinationError(f"cannot write {error.filename or folder}: {what}")


def _check_space(prepared: Prepared, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if prepared.nbytes_out > free:
        raise DestinationError(
            f"expected {prepared.nbytes_out:,} free bytes at {folder}; got {free:,}. Free some, or write elsewhere"
        )


def _report(prepared: Prepared, dst: Path, options: ConvertOptions, written: Written | None) -> ConvertReport:
    """What was done; `written`: None where nothing was left to do."""
    index, plan = prepared.job.index, prepared.job.target
    already_complete, written = written is None, written or Written()
    tracked = {record.path for record in index.records}
    read = {str(f.path) for _, _, state in index.states() for f in state.fragments if f.path}
    return ConvertReport(
        dst=str(dst),
        format=index.format,
        to=options.to,
        topology=plan.topology,
        layout=options.target.layout or ("compressed" if options.target.compress else ""),
        atoms=len(index.atoms if options.part is None else _params(prepared.job)),
        nbytes_written=written.nbytes,
        nbytes_out=sum(written.files),
        files_out=len(written.files),
        nbytes_last=sum(written.last),
        files_last=len(written.last),
        references=prepared.references,
        resumed_bytes=written.resumed,
        already_complete=already_complete,
        checked_bytes=sum(span.nbytes for span in written.spans),
        unchecked_files=()
        if already_complete or options.part or not plan.placements
        else tuple(sorted(read - tracked)),
        copies_checked=0 if already_complete or options.part else _copies(prepared.job),
        warnings=prepared.warnings,
        casts=plan.casts,
        notes=(*index.notes, *plan.notes),
        dropped=index.dropped,
        part=str(options.part or ""),
    )


def _params(job: Job) -> set[str]:
    """Parameters that the tasks of a part are of."""
    numbers = {section.placement for task in job.tasks for fill in task.fills for section in fill.sections}
    return {job.target.placements[own].slice.param for own in numbers if own < len(job.target.placements)}


def _copies(job: Job) -> int:
    checked = {(own.param, own.state) for n in job.checking for own in (job.target.placements[n].slice,)}
    states = (job.index.atoms[param].states[state] for param, state in checked)
    return sum(any(fragment.replica for fragment in state.fragments) for state in states)
