"""Conversion: index, plan, check, then bytes.

1. `ucp.conversion.prepare` reads the source's index and proves that its pieces tile every tensor;
2. and lets the target plan its files, `ucp.plan` the work;
3. an engine carries the work out beside the destination, with a journal;
4. recorded checksums of everything read are compared, checksum fields of what was written filled in;
5. one rename puts the destination in place.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ucp.contract.output_names import check_fits
from ucp.contract.protocols import Engine, Observer
from ucp.contract.registry import engine
from ucp.conversion.journal import line_of, trusted
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import Prepared, prepare
from ucp.core.index import Index
from ucp.core.target import Literal, OutputFile
from ucp.core.tensor import Record, TensorRef
from ucp.core.topology import Topology
from ucp.errors import CorruptError, DestinationError, ReplicaError, counted, listed
from ucp.io.identity import producer
from ucp.io.staging import MARK, Making, Staging, check_apart, check_destination
from ucp.io.write import is_memory
from ucp.transfer.checksums import gaps, mismatches
from ucp.transfer.gather import Gatherer, Sources, Span
from ucp.transfer.output_files import create, seal_checksums
from ucp.transfer.tasks import BLOCK, Job, Task
from ucp.transfer.worker import Done, Sum

__all__ = ["ConvertReport", "carry_out", "owners"]


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
    """Parameters and buffers."""
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

    def __str__(self) -> str:
        what = ", ".join(filter(None, [self.to, self.layout, str(self.topology or "")]))
        refers = f"{counted(self.references, 'reference')} into the source, nothing copied"
        copied = f"{self.nbytes_written:,} bytes of tensors written"
        files = f"{counted(self.files_out, 'file')} of {self.nbytes_out:,} bytes"
        last = f"{counted(self.files_last, 'file')} of {self.nbytes_last:,} bytes"
        copies = f"{counted(self.copies_checked, 'state')} against copies"
        text = [f"{self.dst} ({what}), from {self.format}: {counted(self.atoms, 'parameter')}"]
        if self.already_complete:
            text.append("was complete already: nothing was written")
        else:
            text.append(f"{refers if self.references else copied}; {files}, and the index: {last}")
            text.append(f"{self.checked_bytes:,} bytes of the source checked against checksums, {copies}")
        told = {"warning": self.warnings, "cast": self.casts, "note": self.notes, "dropped": self.dropped}
        return "\n".join([*text, *(f"{kind}: {line}" for kind, lines in told.items() for line in lines)])


def carry_out(
    src: Path,
    dst: Path,
    options: ConvertOptions,
    observer: Observer,
    *,
    prove: Callable[[Job, Path], None] | None = None,
) -> ConvertReport:
    """Convert `src` to `dst`. Raises UcpError; then `dst` is as it was.

    `prove`: is given the work and the finished files before they are put in place; raises when they are not right.
    """
    staging = Staging(dst.resolve())
    check_fits(staging.data, ())
    check_destination(src, dst)
    prepared = prepare(src, options, observer)
    check_apart(dst, prepared.job.index.path, (file.path for file in prepared.job.index.files))
    check_fits(staging.data, (file.path for file in prepared.job.target.files))
    if options.resume and staging.is_complete(prepared.fingerprint):
        staging.sweep()
        return _report(prepared, dst, options, _Written(), already_complete=True)
    if not staging.folder.exists():
        _check_space(prepared, staging.dst.parent)
    try:
        making = Making(prepared.fingerprint, prepared.facts)
        lines = staging.open(making, resume=options.resume, overwrite=options.overwrite)
    except OSError as error:
        raise _unwritable(staging.folder, error) from error
    except DestinationError:
        if options.resume and staging.is_complete(prepared.fingerprint):  # by another run, which this one waited for
            return _report(prepared, dst, options, _Written(), already_complete=True)
        raise
    try:
        written = _write(prepared, staging, lines, observer)
        if prove is not None:
            prove(prepared.job, staging.data)
        staging.commit(fsync=options.fsync)
    except OSError as error:
        staging.release()
        raise _unwritable(staging.folder, error) from error
    except (CorruptError, ReplicaError):
        staging.discard()
        raise
    except BaseException:
        staging.release()
        raise
    return _report(prepared, dst, options, written, already_complete=False)


def _unwritable(folder: Path, error: OSError) -> DestinationError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "no space is left; free some, then continue with --resume"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what = f"{error.strerror}; check the permissions, then continue with --resume"
    else:
        what = f"{error.strerror or error}; when that is put right, continue with --resume"
    return DestinationError(f"cannot write {error.filename or folder}: {what}")


@dataclass(slots=True)
class _Written:
    """What is known of the bytes so far."""

    sums: list[Sum] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    drift: list[str] = field(default_factory=list)
    nbytes: int = 0
    resumed: int = 0
    files: tuple[int, ...] = ()
    last: tuple[int, ...] = ()

    def add(self, done: Done) -> None:
        self.sums.extend(done.sums)
        self.spans.extend(done.spans)
        self.drift.extend(done.drift)


def _write(prepared: Prepared, staging: Staging, lines: Sequence[dict[str, object]], observer: Observer) -> _Written:
    job, root = prepared.job, staging.data
    written = _Written()
    finished = trusted(job, root, lines)
    for done in finished.values():
        written.add(done)
    todo = [task for task in job.tasks if task.number not in finished]
    written.resumed = job.nbytes - sum(task.nbytes for task in todo)
    for file in job.target.files:
        create(root, file, afresh=not finished)
    _run(prepared, staging, todo, written, observer)
    _check_source(job.index, written)
    receipts = seal_checksums(job, root, written.sums)
    sealed = prepared.target.seal(job.index, job.target, receipts)
    closing_files = (_mark(prepared, [*job.target.files, *sealed]), *sealed)
    for last in closing_files:
        create(root, last)
    written.files = tuple(_nbytes_on_disk(root, file, packed=job.target.compress) for file in job.target.files)
    written.last = tuple(file.nbytes for file in closing_files)
    return written


def _nbytes_on_disk(root: Path, file: OutputFile, *, packed: bool) -> int:
    """Bytes of a file that was written; only packs of encoded blocks have another length than was planned."""
    return (root / file.path).stat().st_size if packed else file.nbytes


def _run(prepared: Prepared, staging: Staging, todo: Sequence[Task], written: _Written, observer: Observer) -> None:
    job = prepared.job
    chosen: Engine = engine("processes" if prepared.workers > 1 and len(todo) > 1 else "serial")
    sizes = {task.number: task.nbytes for task in todo}
    threads = 1 if is_memory(staging.data) else prepared.threads  # a second one is there to work while one waits
    stream = chosen.run(job, staging.data, todo, workers=prepared.workers, threads=threads)
    with closing(stream):  # whatever happens here, no worker writes on
        observer.begin(title="convert", nbytes=sum(sizes.values()))
        try:
            for done in stream:
                written.add(done)
                written.nbytes += sizes[done.task]
                staging.note(line_of(done))
                observer.advance(sizes[done.task])
        finally:
            observer.end()


def _check_space(prepared: Prepared, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if prepared.nbytes_out > free:
        raise DestinationError(
            f"expected {prepared.nbytes_out:,} free bytes at {folder}; got {free:,}. Free some, or write elsewhere"
        )


def _check_source(index: Index, written: _Written) -> None:
    """Compare what was read with the checksums the source recorded, and report copies that differ.

    What lies between the pieces (padding; of a selection, the rest of the stretch) is read as well, so that every
    stretch that was read from can be checked.
    """
    if written.drift:
        raise ReplicaError(
            f"{index.path} holds copies that should be equal and are not:\n{listed(written.drift)}\n"
            "the ranks drifted apart, the model was changed after its last step, or files of different runs were "
            "mixed. --drift first or --drift mean settles copies that drifted"
        )
    gatherer = Gatherer(sources=Sources(), tracked=frozenset(record.path for record in index.records))
    for path, offset, nbytes in gaps(index.records, written.spans):
        for low in range(offset, offset + nbytes, BLOCK):
            gatherer.scan(path, low, min(BLOCK, offset + nbytes - low))
    gatherer.sources.close()
    wrong = mismatches(index.records, [*written.spans, *gatherer.spans])
    if wrong:
        raise CorruptError(
            f"CRC-32 differs in {counted(len(wrong), 'record')}: these bytes are not those that were written:\n"
            f"{listed(f'{r.path}: {r.name}{owners(index, r)}' for r in wrong)}\n"
            "the files were damaged after they were saved; copy them again, or use another checkpoint"
        )
    written.spans.extend(gatherer.spans)


def owners(index: Index, record: Record) -> str:
    """Names of the states that lie in a record."""
    held = []
    for atom, name, state in index.states():
        for fragment in state.fragments:
            ref = fragment.ref
            if isinstance(ref, TensorRef) and _meets(ref, record):
                held.append(f"{atom.name}/{name}")
                break
    shown = ", ".join(held[:4]) + (f" and {len(held) - 4} more" if len(held) > 4 else "")
    return f", part of {shown}" if held else ""


def _meets(ref: TensorRef, record: Record) -> bool:
    before_end = ref.offset < record.offset + record.nbytes
    return ref.path == record.path and ref.numel > 0 and before_end and record.offset < ref.offset + ref.extent


def _mark(prepared: Prepared, files: Sequence[OutputFile]) -> OutputFile:
    """The file that says how the destination was made, and which `files` it consists of beside this one."""
    index, plan = prepared.job.index, prepared.job.target
    made = {
        "fingerprint": prepared.fingerprint,
        "made": dict(prepared.facts),
        "producer": producer(),
        "target": prepared.target.name,
        "source": {"path": index.path, "format": index.format, "producer": index.producer, "step": index.step},
        "warnings": prepared.warnings,
        "casts": plan.casts,
        "notes": [*index.notes, *plan.notes],
        "dropped": index.dropped,
        "files": [MARK, *(file.path for file in files)],
    }
    text = json.dumps(made, indent=1).encode() + b"\n"
    return OutputFile(path=MARK, nbytes=len(text), literals=(Literal(0, text),))


def _report(
    prepared: Prepared, dst: Path, options: ConvertOptions, written: _Written, *, already_complete: bool
) -> ConvertReport:
    index, plan = prepared.job.index, prepared.job.target
    tracked = {record.path for record in index.records}
    read = {str(f.path) for _, _, state in index.states() for f in state.fragments if f.path}
    return ConvertReport(
        dst=str(dst),
        format=index.format,
        to=options.to,
        topology=plan.topology,
        layout=options.target.layout or ("compressed" if options.target.compress else ""),
        atoms=len(index.atoms),
        nbytes_written=written.nbytes,
        nbytes_out=sum(written.files),
        files_out=len(written.files),
        nbytes_last=sum(written.last),
        files_last=len(written.last),
        references=prepared.references,
        resumed_bytes=written.resumed,
        already_complete=already_complete,
        checked_bytes=sum(span.nbytes for span in written.spans),
        unchecked_files=() if already_complete or not plan.placements else tuple(sorted(read - tracked)),
        copies_checked=0 if already_complete else _copies(prepared.job),
        warnings=prepared.warnings,
        casts=plan.casts,
        notes=(*index.notes, *plan.notes),
        dropped=index.dropped,
    )


def _copies(job: Job) -> int:
    checked = {(own.param, own.state) for n in job.checking for own in (job.target.placements[n].slice,)}
    states = (job.index.atoms[param].states[state] for param, state in checked)
    return sum(any(fragment.replica for fragment in state.fragments) for state in states)
