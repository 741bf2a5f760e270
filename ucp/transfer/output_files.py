"""Creates the files of a destination with their known bytes, and fills in checksums once the tensors are written."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ucp.core.target import OutputFile, Receipt, Receipts
from ucp.io.writing import reserve, write_at
from ucp.transfer.checksums import combine_crcs, compute_file_crc, make_crc_patches
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.task_list import find_output
from ucp.transfer.worker import Sum


def create_file(root: Path, file: OutputFile, *, afresh: bool = True) -> None:
    """Create a file of full length below `root`, and write its literals.

    `afresh`: whether to discard what an earlier run wrote to it; otherwise only what is missing is added.
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


def has_full_length(root: Path, file: OutputFile) -> bool:
    """Whether a file exists below `root` and has its full length."""
    try:
        return (root / file.path).stat().st_size >= file.nbytes
    except OSError:
        return False


def fill_checksums(job: Job, root: Path, files: Iterable[OutputFile], sums: Iterable[Sum]) -> None:
    """Fill in the checksum fields of `files`, which are files of the job below `root`."""
    written = _ranges_by_file(job, _group_by_placement(sums))
    for file in files:
        if not file.crcs:
            continue
        descriptor = os.open(root / file.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for offset, data in make_crc_patches(file, written.get(file.path, ())):
                write_at(descriptor, data, offset)
        finally:
            os.close(descriptor)


def truncate_files(job: Job, root: Path, sums: Iterable[Sum]) -> None:
    """Truncate files below `root` to their planned length, in case another program made them longer.

    The length of a file of encoded blocks is not planned: it ends with its last block.
    """
    ends = {file.path: file.nbytes for file in job.target.files}
    for written in sums:
        if written.block:
            path = find_output(job.target, written.placement).path
            ends[path] = max(ends[path], sum(written.block))
    for path, nbytes in ends.items():
        if (root / path).stat().st_size > nbytes:
            os.truncate(root / path, nbytes)


def make_receipts(job: Job, sums: Iterable[Sum]) -> Receipts:
    """Digests and checksums of everything that was written."""
    blocks = _group_by_placement(sums)
    written = _ranges_by_file(job, blocks)
    filled = {placement.path for placement in job.target.placements}
    return Receipts(
        placements=tuple(
            Receipt(
                placement=placement,
                digests=tuple(block.digest for block in sums_of_placement),
                crc32=combine_crcs((block.crc32, block.nbytes) for block in sums_of_placement),
                blocks=tuple(block.block for block in sums_of_placement if block.block),
            )
            for number, placement in enumerate(job.target.placements)
            for sums_of_placement in (blocks.get(number, ()),)
        ),
        files={
            file.path: compute_file_crc(file, written.get(file.path, ()))
            for file in job.target.files
            if file.path not in filled
        },
    )


def _group_by_placement(sums: Iterable[Sum]) -> dict[int, list[Sum]]:
    """Checksums by placement, in the order of the elements."""
    blocks: dict[int, list[Sum]] = defaultdict(list)
    for section_sum in sorted(sums, key=lambda section_sum: section_sum.start):
        blocks[section_sum.placement].append(section_sum)
    return blocks


def _ranges_by_file(job: Job, blocks: Mapping[int, Sequence[Sum]]) -> dict[str, list[tuple[int, int, int]]]:
    """What was written in addition to literals, by file: offset, bytes, CRC-32, in increasing offset."""
    written: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for number, placement_sums in blocks.items():
        output = find_output(job.target, number)
        for section_sum in placement_sums:
            offset = output.offset + (section_sum.start - output.start) * output.itemsize
            written[output.path].append((offset, section_sum.nbytes, section_sum.crc32))
    return {path: sorted(ranges) for path, ranges in written.items()}
