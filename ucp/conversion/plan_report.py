"""The report of `ucp plan`: what a conversion would do.

import ucp

report = ucp.plan("ckpt", to="deepspeed", topology="dp=2,zero=1")
print(report)
report.nbytes_out  # of the files that it would write
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucp.conversion.destination.disk import open_destination
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import Prepared, prepare
from ucp.core.index import Index
from ucp.core.layout import Layout
from ucp.core.text.overview import layout_lines, source_facts
from ucp.core.text.page import Page, Report, Section, facts, lines
from ucp.core.text.units import nbytes_text, seconds_text
from ucp.core.topology import Topology
from ucp.errors import format_count

_DISK = 1 << 30
"""Bytes per second of the disk that the stated time assumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport(Report):
    """What is reported of a conversion both before and after it."""

    format: str
    """Format of the source."""
    to: str
    """Target."""
    topology: Topology | None
    """Layout of the run that loads the files; None if they fit any."""
    layout: str
    """Variant of the target's layout; empty for its usual one."""
    atoms: int
    """Number of parameters and buffers; after `--part`, of those that this part wrote."""
    nbytes_written: int
    """Bytes of tensors to write, or that this run wrote, before compression."""
    nbytes_out: int
    """Bytes of the files with tensors and of the files beside them, without the index, which is written last.

    A plan cannot count compressed tensors; after a conversion, it is 0 if there was nothing to do.
    """
    references: int
    """Pieces in files of the source that a virtual destination refers to, copying nothing; 0 for any other."""
    warnings: tuple[str, ...]
    """What keeps a run from resuming as it would from the source."""
    casts: tuple[str, ...]
    """Changes of dtype."""
    notes: tuple[str, ...]
    """What was assumed, and what the target cannot hold or restore."""
    dropped: tuple[str, ...]
    """What is not carried over, with the reasons."""

    def remarks(self) -> Iterator[Section]:
        """The end of the page."""
        yield lines("Casts", self.casts)
        yield lines("Notes", self.notes)
        yield lines("Left behind", self.dropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport(ConversionReport):
    """What a conversion would do."""

    source: Index = field(repr=False)
    """Index of what is taken from the source."""
    nbytes: int
    """Bytes of all states in the source."""
    files: Mapping[str, int] = field(repr=False)
    """Every file to write but the index: path below the destination to bytes."""
    compressed: bool
    """Whether tensors are written compressed: how many bytes they take is known afterwards."""
    tasks: int
    """Pieces of work."""
    workers: int
    """Processes."""
    threads: int
    """Threads in each."""
    projected_bytes: int
    """Memory needed at once, at most."""
    memory: int
    """Memory allowed, in bytes."""
    index_bytes: int
    """Memory for the index and the plan, in addition, at most; grows with parameters and shards, not with elements."""
    source_layout: tuple[str, ...] = ()
    """Layout over the run that saved them: for each axis its degree, the pattern, and the source of that knowledge."""
    target_layout: tuple[str, ...] = ()
    """Layout over the run that loads them; empty if every file holds full tensors."""
    layouts: Mapping[tuple[str, str], Layout] = field(default_factory=dict, repr=False)
    """(parameter, state) to its layout over the ranks of the target; without states that every file holds in full."""
    scratch: str = ""
    """Folder on this machine where files are written before they are uploaded; empty if none are."""
    scratch_bytes: int = 0
    """Bytes that they take there at once, at most."""

    @property
    def nbytes_read(self) -> int:
        """Bytes of tensors to read."""
        return 0 if self.references else self.nbytes

    def page(self) -> Page:
        """The source, what would be done, warnings and notes."""
        yield facts(source_facts(self.source))
        yield facts(_list_facts(self), "Conversion")
        yield lines("Warnings", self.warnings)
        origin = self.source.origin  # set for a store, which holds full tensors
        yield lines(
            f"Layout of the run that saved it ({origin})" if origin else "Layout of the source", self.source_layout
        )
        yield lines("Layout of the target", self.target_layout)
        yield from self.remarks()


def collect_common(prepared: Prepared, options: ConvertOptions) -> dict[str, Any]:
    """What both reports say of a conversion that is decided."""
    index, target = prepared.job.index, prepared.job.target
    return {
        "format": index.format,
        "to": options.to,
        "topology": target.topology,
        "layout": options.target.layout or ("compressed" if options.target.compress else ""),
        "atoms": len(index.atoms),
        "references": prepared.references,
        "warnings": prepared.warnings,
        "casts": target.casts,
        "notes": (*index.notes, *target.notes),
        "dropped": index.dropped,
    }


def preview(src: Path, options: ConvertOptions, dst: Path | None = None) -> PlanReport:
    """Plan the conversion of `src`, and report what it would do; writes nothing. Raises UcpError as `convert` does.

    `dst`: the destination; checked as by `convert`, but not for what is there already.
    """
    destination = None if dst is None else open_destination(dst, options)
    prepared = prepare(src, options, reserved_bytes=0 if destination is None else destination.upload_memory)
    scratch_bytes = 0 if destination is None else destination.check(src, prepared.job)
    index, target = prepared.job.index, prepared.job.target
    return PlanReport(
        **collect_common(prepared, options) | {"topology": target.topology or options.topology},
        source=index,
        nbytes=index.nbytes,
        nbytes_written=prepared.job.nbytes,
        nbytes_out=prepared.nbytes_out,
        files={file.path: file.nbytes for file in target.files},
        compressed=target.compress,
        tasks=len(prepared.job.tasks),
        workers=prepared.workers,
        threads=prepared.threads,
        projected_bytes=prepared.projected_bytes,
        memory=options.memory,
        index_bytes=prepared.index_bytes,
        source_layout=layout_lines(layout for atom in index.atoms.values() for layout in atom.layouts()),
        target_layout=layout_lines((param, state, layout) for (param, state), layout in target.layouts.items()),
        layouts=target.layouts,
        scratch=str(destination.root) if destination is not None and destination.upload_memory else "",
        scratch_bytes=scratch_bytes,
    )


def _list_facts(report: PlanReport) -> Iterator[tuple[str, str]]:
    yield "to", " ".join(filter(None, [report.to, report.layout, str(report.topology or "")]))
    whose = f"of {format_count(report.atoms, 'parameter')}"
    if report.references:
        references = format_count(report.references, "reference")
        yield "tensors", f"{nbytes_text(report.nbytes)} {whose}: {references} into the source, nothing copied"
    else:
        amounts = f"{nbytes_text(report.nbytes_read)} to read, {nbytes_text(report.nbytes_written)} to write"
        yield "tensors", f"{amounts}, {whose}"
    packs = "what the tensors compress to, and " if report.compressed else ""
    files = f"{format_count(len(report.files), 'file')} of {packs}{nbytes_text(report.nbytes_out)}"
    yield "files", f"{files}, and the index"
    at_best = seconds_text((report.nbytes_read + report.nbytes_out) / _DISK)
    yield "time", f"{at_best} or more, if the disk reads and writes 1 GiB/s"
    workers = f"{format_count(report.workers, 'worker')} of {format_count(report.threads, 'thread')}"
    yield "work", f"{format_count(report.tasks, 'task')} by {workers}"
    yield "memory", f"{nbytes_text(report.projected_bytes)} at most, of {nbytes_text(report.memory)} allowed"
    if report.scratch:
        yield "scratch", f"{nbytes_text(report.scratch_bytes)} at most in {report.scratch}, for files to be uploaded"
    yield "index", f"{nbytes_text(report.index_bytes)} of memory at most, in addition"
