"""Files of a destination at their two ends: made with what is known before, completed with what is known after."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from ucp.checksums import combine, patches
from ucp.io.write import reserve, write_at
from ucp.plan import Job
from ucp.target import OutputFile, Receipt
from ucp.union import Sum

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


def seal_checksums(job: Job, root: Path, sums: Iterable[Sum]) -> list[Receipt]:
    """Fill in the checksum fields of all files; the receipts of all placements."""
    receipts, stretches = _receipts(job, sums)
    for file in job.target.files:
        if not file.crcs:
            continue
        descriptor = os.open(root / file.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for offset, data in patches(file, sorted(stretches.get(file.path, []))):
                write_at(descriptor, data, offset)
        finally:
            os.close(descriptor)
    return receipts


def _receipts(job: Job, sums: Iterable[Sum]) -> tuple[list[Receipt], dict[str, list[tuple[int, int, int]]]]:
    """A receipt per placement, and per file what was written where (offset, bytes, CRC-32)."""
    blocks: dict[int, list[Sum]] = defaultdict(list)
    for own in sums:
        blocks[own.placement].append(own)
    receipts = []
    stretches: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    placements = job.target.placements
    for number, placement in enumerate(placements):
        own_sums = sorted(blocks[number], key=lambda own: own.start)
        receipts.append(
            Receipt(
                placement=placement,
                digests=tuple(own.digest for own in own_sums),
                crc32=combine((own.crc32, own.nbytes) for own in own_sums),
                blocks=tuple(own.block for own in own_sums if own.block),
            )
        )
    places = [(p.path, p.offset, p.slice.start, p.slice.dtype.itemsize) for p in placements]
    places += [(raw.path, raw.offset, 0, raw.src.dtype.itemsize) for raw in job.target.raw]
    for number, (path, offset, start, itemsize) in enumerate(places):
        for own in blocks[number]:
            stretches[path].append((offset + (own.start - start) * itemsize, own.nbytes, own.crc32))
    return receipts, stretches
