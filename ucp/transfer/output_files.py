"""Files of a destination at their two ends: made with what is known before, completed with what is known after."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ucp.core.target import OutputFile, Placement, Receipt, Receipts
from ucp.io.write import reserve, write_at
from ucp.transfer.checksums import combine, file_crc, patches
from ucp.transfer.tasks import Job
from ucp.transfer.worker import Sum

__all__ = ["create", "seal_checksums"]


def create(root: Path, file: OutputFile, *, afresh: bool = True) -> None:
    """Make a file of its full length below `root`, its literals in place.

    `afresh`: forget what an earlier run wrote to it; else only put right what it lacks.
    """
    path = root / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if afresh else 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        if os.fstat(descriptor).st_size < file.nbytes:
            reserve(descriptor, file.nbytes)
        for part in file.literals:
            write_at(descriptor, part.data, part.offset)
    finally:
        os.close(descriptor)


def seal_checksums(job: Job, root: Path, sums: Iterable[Sum]) -> Receipts:
    """Fill in the checksum fields of all files; what is known of all that was written."""
    blocks: dict[int, list[Sum]] = defaultdict(list)
    for own in sorted(sums, key=lambda own: own.start):
        blocks[own.placement].append(own)
    written = _stretches(job, blocks)
    for file in job.target.files:
        if not file.crcs:
            continue
        descriptor = os.open(root / file.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for offset, data in patches(file, written.get(file.path, ())):
                write_at(descriptor, data, offset)
        finally:
            os.close(descriptor)
    filled = {placement.path for placement in job.target.placements}
    return Receipts(
        placements=tuple(_receipt(placement, blocks[at]) for at, placement in enumerate(job.target.placements)),
        files={
            file.path: file_crc(file, written.get(file.path, ()))
            for file in job.target.files
            if file.path not in filled
        },
    )


def _receipt(placement: Placement, blocks: Sequence[Sum]) -> Receipt:
    return Receipt(
        placement=placement,
        digests=tuple(own.digest for own in blocks),
        crc32=combine((own.crc32, own.nbytes) for own in blocks),
        blocks=tuple(own.block for own in blocks if own.block),
    )


def _stretches(job: Job, blocks: Mapping[int, Sequence[Sum]]) -> dict[str, list[tuple[int, int, int]]]:
    """What was written beside literals, by file: offset, bytes, CRC-32, in increasing offset."""
    places = [(p.path, p.offset, p.slice.start, p.slice.dtype.itemsize) for p in job.target.placements]
    places += [(raw.path, raw.offset, 0, raw.src.dtype.itemsize) for raw in job.target.raw]
    written: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for number, (path, offset, start, itemsize) in enumerate(places):
        for own in blocks.get(number, ()):
            written[path].append((offset + (own.start - start) * itemsize, own.nbytes, own.crc32))
    return {path: sorted(own) for path, own in written.items()}
