"""Files of a destination at their two ends: made with what is known before, completed with what is known after."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ucp.core.target import OutputFile, Receipt, Receipts
from ucp.io.writing import reserve, write_at
from ucp.transfer.checksums import combine, file_crc, patches
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.task_list import extent_of
from ucp.transfer.worker import Sum


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


def is_whole(root: Path, file: OutputFile) -> bool:
    """Whether a file is there below `root`, in its full length."""
    try:
        return (root / file.path).stat().st_size >= file.nbytes
    except OSError:
        return False


def fill_checksums(job: Job, root: Path, files: Iterable[OutputFile], sums: Iterable[Sum]) -> None:
    """Fill in the checksum fields of `files`, which are of the job and lie below `root`."""
    written = _stretches(job, _by_placement(sums))
    for file in files:
        if not file.crcs:
            continue
        descriptor = os.open(root / file.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for offset, data in patches(file, written.get(file.path, ())):
                write_at(descriptor, data, offset)
        finally:
            os.close(descriptor)


def cut_surplus(job: Job, root: Path, sums: Iterable[Sum]) -> None:
    """Cut off what lies behind the end of files below `root`, as somebody else wrote it: each is as long as planned.

    A pack of encoded blocks, whose length is not planned, ends with its last block.
    """
    ends = {file.path: file.nbytes for file in job.target.files}
    for written in sums:
        if written.block:
            path = extent_of(job.target, written.placement).path
            ends[path] = max(ends[path], sum(written.block))
    for path, nbytes in ends.items():
        if (root / path).stat().st_size > nbytes:
            os.truncate(root / path, nbytes)


def receipts_of(job: Job, sums: Iterable[Sum]) -> Receipts:
    """What is known of all that was written."""
    blocks = _by_placement(sums)
    written = _stretches(job, blocks)
    filled = {placement.path for placement in job.target.placements}
    return Receipts(
        placements=tuple(
            Receipt(
                placement=placement,
                digests=tuple(block.digest for block in of_it),
                crc32=combine((block.crc32, block.nbytes) for block in of_it),
                blocks=tuple(block.block for block in of_it if block.block),
            )
            for number, placement in enumerate(job.target.placements)
            for of_it in (blocks.get(number, ()),)
        ),
        files={
            file.path: file_crc(file, written.get(file.path, ()))
            for file in job.target.files
            if file.path not in filled
        },
    )


def _by_placement(sums: Iterable[Sum]) -> dict[int, list[Sum]]:
    """Sums by placement, in the order of their elements."""
    blocks: dict[int, list[Sum]] = defaultdict(list)
    for own in sorted(sums, key=lambda own: own.start):
        blocks[own.placement].append(own)
    return blocks


def _stretches(job: Job, blocks: Mapping[int, Sequence[Sum]]) -> dict[str, list[tuple[int, int, int]]]:
    """What was written beside literals, by file: offset, bytes, CRC-32, in increasing offset."""
    written: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for number, own in blocks.items():
        at = extent_of(job.target, number)
        for one in own:
            offset = at.offset + (one.start - at.start) * at.itemsize
            written[at.path].append((offset, one.nbytes, one.crc32))
    return {path: sorted(own) for path, own in written.items()}
