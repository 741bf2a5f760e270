"""Prove that the bytes read have the checksums that the writer recorded, and that the loaded tensors hold these bytes.

A record is a range of a file with its CRC-32. CRC-32s of parts combine to that of the whole, so no rank needs all
bytes: one rank checks the record, and the others send it the checksums of what they read of it. Small unread gaps in a
record (padding) are read for this. A record of which more is unread is not checked, and reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ucp.core.tensor import Record
from ucp.errors import CorruptError, format_count, format_list
from ucp.live.exchange.read_shares import share_out
from ucp.live.exchange.reads import LandingTensors, ReadItem, plan_solo_read, start_reading, view_bytes
from ucp.live.parts import LoadItem
from ucp.live.run.ranks import Ranks, run_together
from ucp.transfer.checksums import find_gaps, find_mismatches
from ucp.transfer.gather import Span, ThreadedReader

if TYPE_CHECKING:
    import torch

_MOST_EXTRA = 1 << 20
"""The most bytes of a record that are read only for its checksum; or an eighth of the record, if that is more."""
_FIELDS = 4
"""Numbers that describe a span: its record, its first byte in it, its bytes, its checksum."""


def check_records(records: Sequence[Record], reader: ThreadedReader, ranks: Ranks) -> frozenset[str]:
    """Files with records that have all been checked. Collective.

    `records`: the same on all ranks. Raises CorruptError, on all ranks.
    """
    ordered = sorted(records, key=_start)
    spans = run_together(ranks, lambda: _collect_spans(ordered, reader, ranks))
    assigned = ordered[ranks.rank :: ranks.count]
    starts, unread = [_start(record) for record in assigned], Counter[int]()
    for path, offset, nbytes in find_gaps(assigned, spans):
        unread[bisect_right(starts, (path, offset)) - 1] += nbytes
    limits = [max(_MOST_EXTRA, record.nbytes // 8) for record in assigned]
    checked = [record for number, record in enumerate(assigned) if unread[number] <= limits[number]]
    more = run_together(ranks, lambda: reader.scan(find_gaps(checked, spans)))
    skipped = {record.path for number, record in enumerate(assigned) if unread[number] > limits[number]}
    results = ranks.share((find_mismatches(checked, [*spans, *more]), skipped))
    damaged = [record for differing, _ in results for record in differing]
    if damaged:
        lines = (f"{r.path}: {r.name}, bytes {r.offset}:{r.offset + r.nbytes}" for r in damaged)
        raise CorruptError(
            f"CRC-32 differs in {format_count(len(damaged), 'record')}: these bytes are not those that were written:\n"
            f"{format_list(lines)}\n"
            "the files were damaged after they were saved: copy them again, or use another checkpoint"
        )
    return frozenset(record.path for record in records).difference(*(paths for _, paths in results))


def _collect_spans(ordered: Sequence[Record], reader: ThreadedReader, ranks: Ranks) -> list[Span]:
    """The ranges that all ranks read of the records that this rank checks."""
    import numpy as np

    starts = [_start(record) for record in ordered]
    messages: list[list[int]] = [[] for _ in range(ranks.count)]
    for span in reader.spans(frozenset(starts)):
        number = bisect_right(starts, (span.path, span.offset)) - 1
        if number >= 0 and ordered[number].path == span.path:
            messages[number % ranks.count] += (number, span.offset - starts[number][1], span.nbytes, span.crc32)
    received = ranks.swap([np.array(numbers, dtype=np.uint64) for numbers in messages])
    rows = (row for numbers in received for row in numbers.reshape(-1, _FIELDS).tolist())
    return [Span(ordered[at].path, ordered[at].offset + low, nbytes, crc32) for at, low, nbytes, crc32 in rows]


def _start(record: Record) -> tuple[str, int]:
    return record.path, record.offset


def verify(items: Sequence[LoadItem], tensors: Sequence[torch.Tensor], ranks: Ranks, *, memory: int) -> None:
    """Read the items again, and compare the landing tensors with them bit for bit. Collective.

    Raises CorruptError, on all ranks, with what differs.
    """
    reads = [plan_solo_read(number, item) for number, item in enumerate(items) if item.slice.nbytes]

    def compare() -> None:
        with ThreadedReader(1) as reader:
            differing = list(dict.fromkeys(_find_differing(reads, LandingTensors(tensors), reader, memory // 2)))
        if differing:
            names = (f"{items[number].name}/{items[number].state}" for number in differing)
            count = format_count(len(differing), "tensor differs", "tensors differ")
            raise CorruptError(
                "expected tensors in memory to be equal to the checkpoint, which was read again; "
                f"{count}:\n{format_list(names)}\n"
                "something else wrote to the model or the files, or memory or network are faulty: load again"
            )

    run_together(ranks, compare)


def _find_differing(
    reads: Sequence[ReadItem], tensors: LandingTensors, reader: ThreadedReader, part_nbytes: int
) -> Iterator[int]:
    """Numbers of the items that differ."""
    import torch

    costs = [read.cost for read in reads]
    windows = list(share_out([read.slice for read in reads], costs=costs, readers=1, part_nbytes=part_nbytes))
    buffer = torch.empty(max((window.part_nbytes for window in windows), default=0), dtype=torch.uint8)
    for window in windows:
        segments = list(window.read_by(0))
        parts = [buffer[segment.offset : segment.offset + segment.nbytes] for segment in segments]
        start_reading(reader, reads, segments, [part.numpy().data for part in parts])()
        for segment, part in zip(segments, parts, strict=True):
            read = reads[segment.slice_number]
            pairs = tensors.pieces(read, segment, part)
            as_bytes = ([view_bytes(tensor.cpu().contiguous()) for tensor in pair] for pair in pairs)
            if not all(torch.equal(memory, values) for memory, values in as_bytes):
                yield read.item
