"""Prove that what all ranks read between them is what the writer summed.

CRC-32s of parts combine to that of the whole: no rank needs all bytes. What lies between the parts of a record
(padding) is read too, if it is little; a record of which little was wanted is not checked, and reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from ucp.core.index import Index
from ucp.core.tensor import Record
from ucp.errors import CorruptError, counted, listed
from ucp.live.exchange.transfer import Reader
from ucp.live.run.ranks import Ranks, together
from ucp.transfer.checksums import gaps, mismatches
from ucp.transfer.gather import Span
from ucp.transfer.tasks import BLOCK

__all__ = ["check_records"]

_LITTLE = 1 << 20
"""Bytes of a record that are read for its checksum alone, at most; or an eighth of it, where that is more."""


def check_records(index: Index, reader: Reader, ranks: Ranks) -> frozenset[str]:
    """Files all of whose recorded stretches that were read from are as they were written. Collective.

    Raises CorruptError, on all ranks.
    """
    spans = _all(ranks, reader)
    missing = gaps(index.records, spans)
    checked = _worth_it(index.records, missing)
    stretches = [
        (path, low, min(BLOCK, offset + nbytes - low))
        for path, offset, nbytes in gaps(checked, spans)
        for low in range(offset, offset + nbytes, BLOCK)
    ]
    together(ranks, lambda: reader.scan(stretches[ranks.rank :: ranks.count]))
    wrong = mismatches(checked, _all(ranks, reader))
    if wrong:
        lines = (f"{r.path}: {r.name}, bytes {r.offset}:{r.offset + r.nbytes}" for r in wrong)
        raise CorruptError(
            f"CRC-32 differs in {counted(len(wrong), 'record')}: these bytes are not those that were written:\n"
            f"{listed(lines)}\n"
            "the files were damaged after they were saved: copy them again, or use another checkpoint"
        )
    kept = {_start(record) for record in checked}
    left = {record.path for record in index.records if _start(record) not in kept}
    return frozenset(record.path for record in index.records) - left


def _all(ranks: Ranks, reader: Reader) -> list[Span]:
    return [span for own in ranks.share(reader.spans) for span in own]


def _worth_it(records: Sequence[Record], missing: Sequence[tuple[str, int, int]]) -> list[Record]:
    """Records of which little enough is missing."""
    ordered = sorted(records, key=_start)
    starts = [_start(record) for record in ordered]
    lacking: Counter[int] = Counter()
    for path, offset, nbytes in missing:
        lacking[bisect_right(starts, (path, offset)) - 1] += nbytes
    return [own for at, own in enumerate(ordered) if lacking[at] <= max(_LITTLE, own.nbytes // 8)]


def _start(record: Record) -> tuple[str, int]:
    return record.path, record.offset
