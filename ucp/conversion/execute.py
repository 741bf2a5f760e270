"""Writes the bytes of a conversion: an engine runs the tasks, and all bytes read are compared with checksums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from ucp.contract.plugins import producer
from ucp.contract.protocols import Observer
from ucp.contract.registry import engine
from ucp.conversion.destination.protocol import Destination, ResumePoint, WorkFolder
from ucp.conversion.prepare import Prepared
from ucp.core.index import Index
from ucp.core.target import Literal, OutputFile, Receipts
from ucp.errors import CorruptError, ReplicaError, format_count, format_list
from ucp.io.folder import MARK
from ucp.io.provenance import check_unchanged, dump_mark, is_remote
from ucp.io.writing import is_memory
from ucp.source.read import pause_gc
from ucp.transfer.checksums import compute_file_crc, find_gaps, find_mismatches
from ucp.transfer.compare import describe_owners
from ucp.transfer.gather import Span, ThreadedReader
from ucp.transfer.plan.task_list import count_bytes
from ucp.transfer.worker import Done, Step, Sum


@dataclass(slots=True)
class Written:
    """What has been written and read so far."""

    sums: list[Sum] = field(default_factory=list)
    """Digests and checksums of what was written."""
    spans: list[Span] = field(default_factory=list)
    """Checksums of what was read."""
    drift: list[str] = field(default_factory=list)
    """A line for every copy that differs."""
    nbytes: int = 0
    """Bytes of tensors written by this run."""
    resumed: int = 0
    """Bytes of tensors that an earlier run had written."""
    trusted: int = 0
    """How many of these were trusted from the journals of parts, without reading them back."""
    read_back: int = 0
    """How many of these were read back."""
    files: tuple[int, ...] = ()
    """Bytes of each file with tensors, and of each file beside them."""
    last: tuple[int, ...] = ()
    """Bytes of each metadata file; these are written last."""

    def add(self, done: Done) -> None:
        """Add the report of a task."""
        self.sums.extend(done.sums)
        self.spans.extend(done.spans)
        self.drift.extend(done.drift)


def execute(
    prepared: Prepared,
    destination: Destination,
    resume_point: ResumePoint,
    observer: Observer,
    *,
    fsync: bool,
    verify: Callable[[Path], None] | None,
) -> Written:
    """Write all files that an earlier run did not write, and put the destination in place.

    `verify` is called before that, with the path to read everything back from. Raises CorruptError or ReplicaError if
    the source is not what it should be.
    """
    job = resume_point.job
    written = carry_out_tasks(prepared, destination, resume_point, observer)
    _check_source(job.index, written)
    receipts, sizes = destination.finish(job, written.sums)
    with pause_gc():  # metadata of millions of pieces is millions of objects
        sealed = prepared.target.seal(job.index, job.target, receipts)
    closing_files = (_make_mark(prepared, sizes, receipts, sealed), *sealed)
    written.files = tuple(sizes.values())
    written.last = tuple(file.nbytes for file in closing_files)
    destination.commit(closing_files, fsync=fsync, verify=verify)
    return written


def carry_out_tasks(prepared: Prepared, folder: WorkFolder, resume_point: ResumePoint, observer: Observer) -> Written:
    """Have an engine carry out the remaining tasks, and record each that is done. Returns the reports of all tasks."""
    job, todo_nbytes, written = resume_point.job, count_bytes(resume_point.todo), Written()
    for done in resume_point.done:
        written.add(done)
    written.resumed = job.nbytes - todo_nbytes
    written.trusted, written.read_back = resume_point.trusted_nbytes, resume_point.read_back_nbytes
    chosen = prepared.engine or engine("processes" if prepared.workers > 1 and len(resume_point.todo) > 1 else "serial")
    never_waits = is_memory(folder.root) and not is_remote(job.index.files)
    threads = 1 if never_waits else prepared.threads  # a second thread is for working while the first waits
    with ExitStack() as stack:
        for number, tasks in enumerate(folder.rounds(resume_point.todo)):
            stream = chosen.run(job, folder.root, tasks, workers=prepared.workers, threads=threads)
            with closing(stream):  # after an error here, no worker goes on writing
                if not number:
                    observer.begin(title="convert", nbytes=todo_nbytes)
                    stack.callback(observer.end)
                reported: Counter[int] = Counter()  # bytes of each task that were reported on the way
                for report in stream:
                    if isinstance(report, Step):
                        reported[report.task] += report.nbytes
                        observer.advance(report.nbytes)
                        continue
                    written.add(report)
                    written.nbytes += report.nbytes
                    folder.note(report)
                    observer.advance(report.nbytes - reported[report.task])
    return written


def _check_source(index: Index, written: Written) -> None:
    """Compare what was read with the checksums the source recorded, and report copies that differ.

    Bytes between the pieces (padding; with a selection, the rest of a record) are read as well, so that every record
    that was touched can be checked.
    """
    if not written.drift:
        with ThreadedReader(1) as reader:
            written.spans.extend(reader.scan(find_gaps(index.records, written.spans)))
    check_read(index, written)


def check_read(index: Index, written: Written) -> None:
    """Raise ReplicaError for copies that differ, CorruptError for records whose bytes do not match their checksum."""
    if written.drift:
        lines = list(dict.fromkeys(written.drift))  # in a bucket, a task of several files is recorded with each of them
        raise ReplicaError(
            f"{index.path} holds copies that should be equal and are not:\n{format_list(lines)}\n"
            "the ranks drifted apart, the model was changed after its last step, or files of different runs were "
            "mixed. --drift first or --drift mean chooses a value where copies drifted"
        )
    wrong = find_mismatches(index.records, written.spans)
    if wrong:
        with ThreadedReader(1) as reader:
            reread = reader.scan((record.path, record.offset, record.nbytes) for record in wrong)
        if not find_mismatches(wrong, reread):
            raise CorruptError(
                f"expected the journal of the conversion to hold the checksums of what was read from {index.path}; "
                f"other ones are noted for\n{format_list(f'{r.path}: {r.name}' for r in wrong)}\nThe source is as it "
                "was saved: the journal was damaged, or memory fails. Convert again with --overwrite"
            )
        raise CorruptError(
            f"CRC-32 differs in {format_count(len(wrong), 'record')}: these bytes are not those that were written:\n"
            f"{format_list(f'{r.path}: {r.name}{describe_owners(index, r)}' for r in wrong)}\n"
            "the files were damaged after they were saved; copy them again, or use another checkpoint"
        )
    check_unchanged(index.files)


def _make_mark(
    prepared: Prepared, sizes: Mapping[str, int], receipts: Receipts, sealed: Sequence[OutputFile]
) -> OutputFile:
    """The file that says how the destination was made, and which files it consists of.

    `sizes`: bytes of each planned file. `sealed`: files that are written after this one.
    """
    index, plan = prepared.job.index, prepared.job.target
    provenance = {
        "fingerprint": prepared.fingerprint,
        "made": dict(prepared.facts),
        "producer": producer(),
        "target": prepared.target.name,
        "source": {"path": index.path, "format": index.format, "producer": index.producer, "step": index.step},
        "warnings": prepared.warnings,
        "casts": plan.casts,
        "notes": [*index.notes, *plan.notes],
        "dropped": index.dropped,
    }
    text = dump_mark(
        provenance,
        {**sizes, **{file.path: None if file.is_pointer else file.nbytes for file in sealed}},
        {
            **{path: receipts.files[path] for path in plan.last},
            **{file.path: compute_file_crc(file, ()) for file in sealed if not file.is_pointer},
        },
    )
    return OutputFile(path=MARK, nbytes=len(text), literals=(Literal(0, text),))
