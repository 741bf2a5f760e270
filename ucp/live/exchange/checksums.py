"""Prove that what all ranks read between them is what the writer summed.

CRC-32s of parts combine to that of the whole: no rank needs all bytes. Every record is looked after by one rank, to
which the others send the checksums of what they read of it. What lies between the parts of a record (padding) is read
too, if it is little; a record of which little was wanted is not checked, and reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from ucp.core.tensor import Record
from ucp.errors import CorruptError, counted, listed
from ucp.live.run.ranks import Ranks, together
from ucp.transfer.checksums import gaps, mismatches
from ucp.transfer.gather import Reader, Span

__all__ = ["check_records"]

_LITTLE = 1 << 20
"""Bytes of a record that are read for its checksum alone, at most; or an eighth of it, where that is more."""

_FIELDS = 4
"""Numbers that tell of a span: its record, its first byte in it, its bytes, its checksum."""


def check_records(records: Sequence[Record], reader: Reader, ranks: Ranks) -> frozenset[str]:
    """Files all of whose recorded stretches that were read from are as they were written. Collective.

    `records`: the same on all ranks. Raises CorruptError, on all ranks.
    """
    ordered = sorted(records, key=_start)
    spans = together(ranks, lambda: _told(ordered, reader, ranks))
    mine = ordered[ranks.rank :: ranks.count]
    checked = _worth_it(mine, gaps(mine, spans))
    more = together(ranks, lambda: reader.scan(gaps(checked, spans)))
    kept = {_start(record) for record in checked}
    left = {record.path for record in mine if _start(record) not in kept}
    told = ranks.share((mismatches(checked, [*spans, *more]), left))
    wrong = [record for own, _ in told for record in own]
    if wrong:
        lines = (f"{r.path}: {r.name}, bytes {r.offset}:{r.offset + r.nbytes}" for r in wrong)
        raise CorruptError(
            f"CRC-32 differs in {counted(len(wrong), 'record')}: these bytes are not those that were written:\n"
            f"{listed(lines)}\n"
            "the files were damaged after they were saved: copy them again, or use another checkpoint"
        )
    return frozenset(record.path for record in records).difference(*(own for _, own in told))


def _told(ordered: Sequence[Record], reader: Reader, ranks: Ranks) -> list[Span]:
    """What all ranks read of the records that this one looks after."""
    import numpy as np

    starts = [_start(record) for record in ordered]
    told: list[list[int]] = [[] for _ in range(ranks.count)]
    for span in reader.spans(frozenset(starts)):
        number = bisect_right(starts, (span.path, span.offset)) - 1
        if number >= 0 and ordered[number].path == span.path:
            told[number % ranks.count] += (number, span.offset - starts[number][1], span.nbytes, span.crc32)
    heard = ranks.swap([np.array(numbers, dtype=np.uint64) for numbers in told])
    return [_span(numbers, ordered) for own in heard for numbers in own.reshape(-1, _FIELDS).tolist()]


def _span(numbers: Sequence[int], ordered: Sequence[Record]) -> Span:
    number, offset, nbytes, crc32 = numbers
    record = ordered[number]
    return Span(record.path, record.offset + offset, nbytes, crc32)


def _worth_it(records: Sequence[Record], missing: Sequence[tuple[str, int, int]]) -> list[Record]:
    """Records, in increasing order, of which little enough is missing."""
    starts = [_start(record) for record in records]
    lacking: Counter[int] = Counter()
    for path, offset, nbytes in missing:
        lacking[bisect_right(starts, (path, offset)) - 1] += nbytes
    return [own for at, own in enumerate(records) if lacking[at] <= max(_LITTLE, own.nbytes // 8)]


def _start(record: Record) -> tuple[str, int]:
    return record.path, record.offset
