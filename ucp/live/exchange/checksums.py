"""Prove that what all ranks read between them is what the writer summed.

CRC-32s of parts combine to that of the whole: no rank needs all bytes. Every record is looked after by one rank, to
which the others send the checksums of what they read of it. What lies between the parts of a record (padding) is read
too, if it is little; a record of which little was wanted is not checked, and reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ucp.core.tensor import Record
from ucp.errors import CorruptError, counted, listed
from ucp.live.exchange.loads import Load, Places, bytes_of, own_load
from ucp.live.exchange.read_shares import share_out
from ucp.live.exchange.reading import start_reading
from ucp.live.parts import LoadItem
from ucp.live.run.ranks import Ranks, together
from ucp.transfer.checksums import find_gaps, find_mismatches
from ucp.transfer.gather import Reader, Span

if TYPE_CHECKING:
    import torch

_LITTLE = 1 << 20
"""Bytes of a record that are read for its checksum alone, at most; or an eighth of it, where that is more."""

_FIELDS = 4
"""Numbers that tell of a span: its record, its first byte in it, its bytes, its checksum."""


def check_records(records: Sequence[Record], reader: Reader, ranks: Ranks) -> frozenset[str]:
    """Files all of whose recorded stretches that were read from are as they were written. Collective.

    `records`: the same on all ranks. Raises CorruptError, on all ranks.
    """
    ordered = sorted(records, key=_start)
    spans = together(ranks, lambda: _spans_of_all(ordered, reader, ranks))
    mine = ordered[ranks.rank :: ranks.count]
    starts, lacking = [_start(record) for record in mine], Counter[int]()
    for path, offset, nbytes in find_gaps(mine, spans):
        lacking[bisect_right(starts, (path, offset)) - 1] += nbytes
    checked = [record for at, record in enumerate(mine) if lacking[at] <= max(_LITTLE, record.nbytes // 8)]
    more = together(ranks, lambda: reader.scan(find_gaps(checked, spans)))
    kept = {_start(record) for record in checked}
    left = {record.path for record in mine if _start(record) not in kept}
    told = ranks.share((find_mismatches(checked, [*spans, *more]), left))
    wrong = [record for own, _ in told for record in own]
    if wrong:
        lines = (f"{r.path}: {r.name}, bytes {r.offset}:{r.offset + r.nbytes}" for r in wrong)
        raise CorruptError(
            f"CRC-32 differs in {counted(len(wrong), 'record')}: these bytes are not those that were written:\n"
            f"{listed(lines)}\n"
            "the files were damaged after they were saved: copy them again, or use another checkpoint"
        )
    return frozenset(record.path for record in records).difference(*(own for _, own in told))


def _spans_of_all(ordered: Sequence[Record], reader: Reader, ranks: Ranks) -> list[Span]:
    """What all ranks read of the records that this one looks after."""
    import numpy as np

    starts = [_start(record) for record in ordered]
    told: list[list[int]] = [[] for _ in range(ranks.count)]
    for span in reader.spans(frozenset(starts)):
        number = bisect_right(starts, (span.path, span.offset)) - 1
        if number >= 0 and ordered[number].path == span.path:
            told[number % ranks.count] += (number, span.offset - starts[number][1], span.nbytes, span.crc32)
    heard = ranks.swap([np.array(numbers, dtype=np.uint64) for numbers in told])
    rows = (row for numbers in heard for row in numbers.reshape(-1, _FIELDS).tolist())
    return [Span(ordered[at].path, ordered[at].offset + low, nbytes, crc32) for at, low, nbytes, crc32 in rows]


def _start(record: Record) -> tuple[str, int]:
    return record.path, record.offset


def verify(items: Sequence[LoadItem], into: Sequence[torch.Tensor], ranks: Ranks, *, memory: int) -> None:
    """Compare the landing tensors bit for bit with their items, cast as these are. Collective.

    Raises CorruptError, on all ranks, that names what differs.
    """
    loads = [own_load(number, item) for number, item in enumerate(items) if item.slice.nbytes]

    def compare() -> None:
        with Reader(1) as reader:
            differing = list(dict.fromkeys(_differing(loads, Places(into), reader, memory // 2)))
        if differing:
            names = (f"{items[at].name}/{items[at].state}" for at in differing)
            many = counted(len(differing), "tensor in memory differs", "tensors in memory differ")
            raise CorruptError(
                f"expected what the checkpoint holds; when it is read again, {many}:\n{listed(names)}\n"
                "something else writes to the model or the files meanwhile, or memory or network are faulty: load again"
            )

    together(ranks, compare)


def _differing(loads: Sequence[Load], places: Places, reader: Reader, nbytes: int) -> Iterator[int]:
    """Items that differ."""
    import torch

    slices = [load.slice for load in loads]
    windows = list(share_out(slices, costs=[load.cost for load in loads], readers=1, part_nbytes=nbytes))
    buffer = torch.empty(max((window.part_nbytes for window in windows), default=0), dtype=torch.uint8)
    for window in windows:
        segments = list(window.segments(0))
        parts = [buffer[own.offset : own.offset + own.nbytes] for own in segments]
        start_reading(reader, loads, segments, [part.numpy().data for part in parts]).finish()
        for segment, part in zip(segments, parts, strict=True):
            load = loads[segment.load]
            pairs = ([bytes_of(own.cpu().contiguous()) for own in pair] for pair in places.pieces(load, segment, part))
            if not all(torch.equal(memory, values) for memory, values in pairs):
                yield load.item
