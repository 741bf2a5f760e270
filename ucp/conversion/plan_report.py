"""What a conversion would do, for the person who asks before it is begun.

import ucp

report = ucp.plan("ckpt", to="deepspeed", topology="dp=2,zero=1")
print(report)
report.nbytes_out  # of the files that it would write
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ucp.conversion.destination.choice import destination_at
from ucp.conversion.options import ConvertOptions
from ucp.conversion.prepare import prepare
from ucp.core.index import Index
from ucp.core.topology import Topology
from ucp.errors import counted

__all__ = ["PlanReport", "preview"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What a conversion would do."""

    source: Index = field(repr=False)
    """What is taken of the source."""
    format: str
    """Format of the source."""
    to: str
    """Target."""
    topology: Topology | None
    """Layout of the run that loads what is written; None where it fits any."""
    layout: str
    """Variant of the target's layout; empty for its usual one."""
    atoms: int
    """Parameters and buffers."""
    nbytes: int
    """Bytes of all their states in the source."""
    nbytes_written: int
    """Bytes of tensors to write, before compression."""
    nbytes_out: int
    """Bytes of `files`; not what compressed tensors will take, nor the index, which is written last."""
    files: Mapping[str, int] = field(repr=False)
    """Every file to write but the index: path below the destination to bytes."""
    references: int
    """Pieces in files of the source that a virtual destination refers to, copying nothing; 0 for any other."""
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
    """Memory for the index and the plan beside it, at most: it grows with parameters and shards, not with elements."""
    warnings: tuple[str, ...]
    """What keeps a run from resuming as it would from the source."""
    casts: tuple[str, ...]
    """Changes of dtype."""
    notes: tuple[str, ...]
    """What was assumed, and what the target cannot hold or restore."""
    dropped: tuple[str, ...]
    """What is not carried over, with the reasons."""
    scratch: str = ""
    """Folder of this machine in which files grow before they are uploaded; empty where none is."""
    scratch_bytes: int = 0
    """Bytes that they take there at once, at most."""

    @property
    def nbytes_read(self) -> int:
        """Bytes of tensors to read."""
        return 0 if self.references else self.nbytes

    def __str__(self) -> str:
        what = ", ".join(filter(None, [self.to, self.layout, str(self.topology or "")]))
        copied = f"{self.nbytes_read:,} bytes to read, {self.nbytes_written:,} to write"
        tensors = f"{counted(self.references, 'reference')} into the source, nothing copied"
        packs = " and what the tensors compress to" if self.compressed else ""
        by = f"{counted(self.workers, 'worker')} of {counted(self.threads, 'thread')}"
        memory = f"{self.projected_bytes:,} bytes of memory at most, and {self.index_bytes:,} for the index"
        text = [
            f"{self.source.path} ({self.format}, {self.source.topology}, step {self.source.step}) to {what}",
            f"{tensors if self.references else copied}, of {counted(self.atoms, 'parameter')}",
            f"{counted(len(self.files), 'file')} of {self.nbytes_out:,} bytes{packs}, and the index",
            f"{counted(self.tasks, 'task')} by {by}, {memory}",
        ]
        if self.scratch:
            text.append(f"{self.scratch_bytes:,} bytes of {self.scratch} at most, for files before they are uploaded")
        told = {"warning": self.warnings, "cast": self.casts, "note": self.notes, "dropped": self.dropped}
        text += [f"{kind}: {line}" for kind, lines in told.items() for line in lines]
        return "\n".join(text)


def preview(src: Path, options: ConvertOptions, dst: Path | None = None) -> PlanReport:
    """Decide the conversion of `src`, and tell what it would do; writes nothing. Raises UcpError as `convert` does.

    `dst`: where to, as far as that matters: nothing is looked at there.
    """
    destination = None if dst is None else destination_at(dst, options)
    prepared = prepare(src, options, beside_bytes=0 if destination is None else destination.beside_bytes)
    scratch_bytes = 0 if destination is None else destination.scratch_for(prepared.job)
    index, target = prepared.job.index, prepared.job.target
    return PlanReport(
        source=index,
        format=index.format,
        to=options.to,
        topology=target.topology or options.topology,
        layout=options.target.layout or ("compressed" if options.target.compress else ""),
        atoms=len(index.atoms),
        nbytes=index.nbytes,
        nbytes_written=prepared.job.nbytes,
        nbytes_out=prepared.nbytes_out,
        files={file.path: file.nbytes for file in target.files},
        references=prepared.references,
        compressed=target.compress,
        tasks=len(prepared.job.tasks),
        workers=prepared.workers,
        threads=prepared.threads,
        projected_bytes=prepared.projected_bytes,
        memory=options.memory,
        index_bytes=prepared.index_bytes,
        warnings=prepared.warnings,
        casts=target.casts,
        notes=(*index.notes, *target.notes),
        dropped=index.dropped,
        scratch=str(destination.root) if destination is not None and destination.beside_bytes else "",
        scratch_bytes=scratch_bytes,
    )
