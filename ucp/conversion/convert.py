"""A conversion from end to end: prepare, execute, verify, commit.

1. `prepare` reads the source's index, proves that its shards tile every tensor, lets the target plan its files, and
   plans the work;
2. `execute` has an engine write the files to a working folder (`ucp.conversion.destination`), with a journal, and
   compares recorded checksums of everything read;
3. `verify_written` reads the files back, if asked;
4. `commit` puts the destination in place: on a disk by one rename, in a bucket by the object that is written last.

With `--part` (`ucp.conversion.parts`), each part does its share of step 2, and `--finalize` does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ucp.contract.protocols import Observer, SourceOptions, Target
from ucp.contract.sidecars import list_sidecars
from ucp.conversion.destination.disk import DiskDestination, open_destination
from ucp.conversion.destination.protocol import show_waiting
from ucp.conversion.execute import Written, execute
from ucp.conversion.options import ConvertOptions
from ucp.conversion.parts.run import write_part
from ucp.conversion.plan_report import ConversionReport, collect_common
from ucp.conversion.prepare import Prepared, prepare
from ucp.core.index import WEIGHT, Index
from ucp.core.text.page import Page, facts, lines
from ucp.core.text.units import nbytes_text, rate_text, seconds_text
from ucp.errors import CorruptError, UsageError, format_count, format_list
from ucp.io.folder import url_scheme
from ucp.source.read import read_with_options
from ucp.transfer.compare import find_corruption, find_drift, fit_threads
from ucp.transfer.differences import compare, keeps_extras
from ucp.transfer.plan.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport(ConversionReport):
    """What a conversion did."""

    dst: str
    """Destination."""
    files_out: int
    """Number of the files that `nbytes_out` counts."""
    nbytes_last: int
    """Bytes of the metadata files, which are written last."""
    files_last: int
    """Number of the metadata files."""
    resumed_bytes: int
    """Bytes that an earlier run had already written."""
    believed_bytes: int
    """How many of these `finalize` did not read back, as the part that wrote them had synced them and then ended."""
    read_back_bytes: int
    """How many of these were read back and compared with their digests."""
    already_complete: bool
    """Whether there was nothing to do."""
    checked_bytes: int
    """Source bytes compared with checksums that the writer recorded."""
    unchecked_files: tuple[str, ...]
    """Source files read from that carry no checksums."""
    copies_checked: int
    """States of which the source held copies (replicas, the model's own weights) that were compared."""
    part: str = ""
    """Which part this was, such as "3/8"; empty for all. Files and copies are counted by `finalize` only."""
    scratch_bytes: int = 0
    """Most bytes that files waiting for upload took in the scratch folder at once; 0 for a destination on disk."""

    seconds: float = field(default=0.0, compare=False)
    """Time it took."""
    verified: bool = False
    """Whether everything was read back and compared with the source."""

    def page(self) -> Page:
        """What was written and checked, warnings and notes."""
        yield facts(_list_facts(self))
        yield lines("Warnings", self.warnings)
        yield from self.remarks()


def carry_out(src: Path, dst: Path, options: ConvertOptions, observer: Observer) -> ConvertReport:
    """Convert `src` to `dst`. Raises UcpError; then `dst` is as it was."""
    nul = next((path for path in (src, dst) if "\0" in str(path)), None)
    if nul is not None:
        raise UsageError(f"expected paths without a NUL character, which would end them; got {str(nul)!r}")
    start = time.monotonic()
    with _exclusive_stores(src, dst, observer):
        report = _carry_out(src, dst, options, observer)
    return replace(report, seconds=time.monotonic() - start)


@contextmanager
def _exclusive_stores(src: Path, dst: Path, observer: Observer) -> Iterator[None]:
    """Wait until no other thread of this process converts with a bucket: a fork closes connections of all threads."""
    if not any(map(url_scheme, (src, dst))):
        yield
        return
    from ucp.io.remote.connections import fork_lock  # with asyncio

    lock = fork_lock()
    if not lock.acquire(blocking=False):
        with show_waiting(observer, "another conversion of this process that uses a bucket"):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _carry_out(src: Path, dst: Path, options: ConvertOptions, observer: Observer) -> ConvertReport:
    """`carry_out`, after the check of the paths and the wait for other threads."""
    destination = open_destination(dst, options)
    destination.check(src)
    remote = any(url_scheme(path) for path in (src, dst))
    threads = fit_threads(options.memory, remote=remote) if options.verify else 0
    prepared = prepare(src, options, observer, reserved_bytes=destination.upload_memory)
    destination.check(src, prepared.job)
    with destination:
        if isinstance(destination, DiskDestination) and options.part is not None:  # a bucket has refused --part
            return _make_report(prepared, write_part(prepared, destination.staging, options, observer), dst, options)
        resume_point = destination.begin(prepared, observer)
        if resume_point is None:
            return _make_report(prepared, None, dst, options)
        verify = partial(
            verify_written,
            prepared.job,
            source=options.source,
            observer=observer,
            threads=threads,
            target=None if url_scheme(dst) else prepared.target,
        )
        written = execute(
            prepared,
            destination,
            resume_point,
            observer,
            fsync=options.fsync,
            verify=verify if options.verify else None,
        )
    return _make_report(prepared, written, dst, options, scratch=destination.scratch_bytes)


def _make_report(
    prepared: Prepared, written: Written | None, dst: Path, options: ConvertOptions, *, scratch: int = 0
) -> ConvertReport:
    """What was done; `written`: None if there was nothing to do."""
    index, plan = prepared.job.index, prepared.job.target
    already_complete, written = written is None, written or Written()
    tracked = {record.path for record in index.records}
    read = {str(f.path) for _, _, state in index.states() for f in state.fragments if f.path}
    common = collect_common(prepared, options)
    if options.part is not None:
        numbers = {s.placement for task in prepared.job.tasks for fill in task.fills for s in fill.sections}
        common["atoms"] = len({plan.placements[n].slice.param for n in numbers if n < len(plan.placements)})
    checked = {(p.param, p.state) for n in prepared.job.checking for p in (plan.placements[n].slice,)}
    states = (index.atoms[param].states[state] for param, state in checked)
    copies = sum(any(fragment.replica for fragment in state.fragments) for state in states)
    return ConvertReport(
        **common,
        dst=str(dst),
        nbytes_written=written.nbytes,
        nbytes_out=sum(written.files),
        files_out=len(written.files),
        nbytes_last=sum(written.last),
        files_last=len(written.last),
        resumed_bytes=written.resumed,
        believed_bytes=written.trusted,
        read_back_bytes=written.read_back,
        already_complete=already_complete,
        checked_bytes=sum(span.nbytes for span in written.spans),
        unchecked_files=()
        if already_complete or options.part or not plan.placements
        else tuple(sorted(read - tracked)),
        copies_checked=0 if already_complete or options.part else copies,
        part=str(options.part or ""),
        scratch_bytes=scratch,
        verified=options.verify and not already_complete,
    )


def _list_facts(report: ConvertReport) -> Iterator[tuple[str, str]]:
    layout = ", ".join(filter(None, [report.to, report.layout, str(report.topology or "")]))
    if report.already_complete:
        yield "complete", f"{report.dst} ({layout})"
        yield "", "nothing was written: files and sizes are as recorded; `ucp verify` reads them"
        return
    part = f"part {report.part} of " if report.part else ""
    yield "wrote", f"{part}{report.dst} ({layout})"
    yield "tensors", _describe_tensors(report)
    if report.part:
        yield "resumed", _describe_resumed(report)
        yield "then", "when all parts are done, the same command with --finalize completes it"
        return
    last = f"index: {_describe_files(report.files_last, report.nbytes_last)}"
    yield "files", f"{_describe_files(report.files_out, report.nbytes_out)}, and the {last}"
    yield "scratch", f"{nbytes_text(report.scratch_bytes)} at most" if report.scratch_bytes else ""
    yield "resumed", _describe_resumed(report)
    unread = f"nothing: no tensor was read; `ucp verify {report.dst}` reads the bytes that the references name"
    yield "checked", ", ".join(_list_checks(report)) or (unread if report.references and not report.verified else "")
    yield "verified", "read back and equal to the source" if report.verified else ""


def _describe_resumed(report: ConvertReport) -> str:
    if not report.resumed_bytes:
        return ""
    amounts = {"trusted from the journal": report.believed_bytes, "read back": report.read_back_bytes}
    how = ", ".join(f"{nbytes_text(nbytes)} {what}" for what, nbytes in amounts.items() if nbytes)
    return f"{nbytes_text(report.resumed_bytes)} already there{how and f': {how}'}"


def _describe_tensors(report: ConvertReport) -> str:
    """What was done with the bytes of tensors."""
    whose, spent = f"of {format_count(report.atoms, 'parameter')}", f"in {seconds_text(report.seconds)}"
    if report.references:
        return f"{format_count(report.references, 'reference')} into the source, {whose}; nothing copied; {spent}"
    rate = rate_text(report.nbytes_written, report.seconds) if report.nbytes_written else ""
    how = "with --verify" if report.verified else rate
    return f"{nbytes_text(report.nbytes_written)} written, {whose}, {spent}{f' ({how})' if how else ''}"


def _describe_files(count: int, nbytes: int) -> str:
    return f"{format_count(count, 'file')} of {nbytes_text(nbytes)}"


def _list_checks(report: ConvertReport) -> Iterator[str]:
    if report.checked_bytes:
        yield f"{nbytes_text(report.checked_bytes)} of the source against checksums"
    if report.copies_checked:
        yield f"{format_count(report.copies_checked, 'state')} against copies in the source"
    if report.unchecked_files:
        yield f"{format_count(len(report.unchecked_files), 'file')} of the source without checksums"


def verify_written(
    job: Job, written: Path, *, source: SourceOptions, observer: Observer, threads: int, target: Target | None = None
) -> None:
    """Read back what was written, before it is put in place, and compare it with the source. Raises CorruptError.

    `target`: its framework's reader looks at the files, too; None: ours alone.

    `source`: the user's options for the source; the written files are read with those that their format takes.
    """
    before, index = job.index, read_with_options(written, source=source, unfinished=True)
    before = match_ties(index, before)
    if job.target.regrouped:
        before, index = (replace(side, groups=()) for side in (before, index))
    if not keeps_extras(before, index):
        before, index = (_keep_companions(side, job) for side in (before, index))
    before = _match_groups(index, before, job)
    changes = compare(before, index, observer, cast=True, extras=True, threads=threads)
    lines = [
        *(target.find_faults(written) if target is not None else ()),
        *find_corruption(index, observer, threads),
        *find_drift(index, observer, threads),
        *(
            f"{c.param}/{c.state} {c.what}: {c.a} in the source, {c.b} written"
            for c in changes
            if c.what != "missing" or c.state not in job.target.zeros.get(c.param, ())
        ),
    ]
    if lines:
        subject = "what was written differs" if job.target.placements else "the bytes that references point to differ"
        raise CorruptError(f"read back, {subject} from the source; the destination is removed:\n{format_list(lines)}")


def _keep_companions(index: Index, job: Job) -> Index:
    """`index` with no extras except the sidecar files that were copied."""
    carried = {extra.name for extra in list_sidecars(job.index)}
    names = {file.path for file in job.target.files if file.path in carried}
    companions = tuple(extra for extra in index.extras if extra.is_sidecar and extra.name.partition("/")[2] in names)
    return replace(index, extras=companions)


def match_ties(written: Index, source: Index) -> Index:
    """`source` with the ties that the reader of the written files sees, which may be more, or fewer.

    A tied name that the reader takes for a separate tensor is compared with the first one.
    """
    separate = {alias: name for alias, name in source.aliases.items() if alias in written.atoms}
    copies = {
        alias: replace(source.atoms[name], name=alias, states={WEIGHT: source.atoms[name].states[WEIGHT]})
        for alias, name in separate.items()
    }
    aliases = {alias: name for alias, name in source.aliases.items() if alias not in separate}
    return replace(source, atoms={**source.atoms, **copies}, aliases={**written.aliases, **aliases})


def _match_groups(written: Index, source: Index, job: Job) -> Index:
    """`source`, without the group members that have no optimizer states in the target."""
    grouped = {name for group in written.groups for name in group.params}
    bare = {name for name, atom in source.atoms.items() if not atom.states.keys() - {WEIGHT}} | job.target.lost.keys()
    groups = (replace(g, params=tuple(p for p in g.params if p in grouped or p not in bare)) for g in source.groups)
    return replace(source, groups=tuple(groups))
