"""Checksums of ranges of a file, combined from checksums of their parts.

The CRC-32 of "ab" follows from those of "a" and "b", so parts may be read or written in any order, by any process.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from zlib_ng import zlib_ng

from ucp.core.target import CrcField, OutputFile
from ucp.core.tensor import Record
from ucp.errors import CoverError
from ucp.transfer.gather import Span

_ZEROS = bytes(1 << 20)


def combine_crcs(parts: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of the concatenation of parts given as (CRC-32, bytes).

    >>> import zlib
    >>> combine_crcs([(zlib.crc32(b"ab"), 2), (zlib.crc32(b"c"), 1)]) == zlib.crc32(b"abc")
    True
    """
    crc = 0
    for part_crc, nbytes in parts:
        crc = zlib_ng.crc32_combine(crc, part_crc, nbytes)
    return crc


def crc_of_zeros(nbytes: int) -> int:
    """CRC-32 of `nbytes` zero bytes."""
    crc = 0
    while nbytes:
        step = min(nbytes, len(_ZEROS))
        crc = zlib_ng.crc32(memoryview(_ZEROS)[:step], crc)
        nbytes -= step
    return crc


def find_gaps(records: Sequence[Record], spans: Sequence[Span]) -> list[tuple[str, int, int]]:
    """Ranges (path, offset, bytes) that must still be read to check every record that was read in part."""
    missing = []
    for record, inside in _match_spans(records, spans):
        at = record.offset
        for span in [*_select_chain(record, inside), None]:
            until = record.offset + record.nbytes if span is None else span.offset
            if until > at:
                missing.append((record.path, at, until - at))
            at = until if span is None else span.offset + span.nbytes
    return missing


def find_mismatches(records: Sequence[Record], spans: Sequence[Span]) -> list[Record]:
    """Records that were read completely and whose CRC-32 differs from the recorded one."""
    wrong = []
    for record, inside in _match_spans(records, spans):
        chain = list(_select_chain(record, inside))
        if sum(span.nbytes for span in chain) != record.nbytes:
            continue
        if combine_crcs((span.crc32, span.nbytes) for span in chain) != record.crc32:
            wrong.append(record)
    return wrong


def _match_spans(records: Sequence[Record], spans: Sequence[Span]) -> Iterator[tuple[Record, list[Span]]]:
    """Each record that contains the start of a span, with these spans in increasing offset."""
    ordered = sorted(spans, key=lambda span: (span.path, span.offset, -span.nbytes))
    by_path = {path: list(group) for path, group in groupby(ordered, key=lambda span: span.path)}
    cursors = dict.fromkeys(by_path, 0)
    for record in sorted(records, key=lambda record: (record.path, record.offset)):
        group = by_path.get(record.path, [])
        at = cursors.get(record.path, 0)
        inside = []
        while at < len(group) and group[at].offset < record.offset + record.nbytes:
            if group[at].offset >= record.offset:
                inside.append(group[at])
            at += 1
        cursors[record.path] = at
        if inside:
            yield record, inside


def _select_chain(record: Record, inside: Sequence[Span]) -> Iterator[Span]:
    """Spans inside a record, in order, without those that overlap an earlier one."""
    at, stop = record.offset, record.offset + record.nbytes
    for span in inside:
        if span.offset >= at and span.offset + span.nbytes <= stop:
            yield span
            at = span.offset + span.nbytes


def make_crc_patches(file: OutputFile, sums: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, bytes]]:
    """The values of all checksum fields of `file`, as (offset, data) to write.

    `sums`: (offset, bytes, CRC-32) of what was written in addition to the literals, in increasing offset. Raises
    CoverError if one of these ranges is only partly inside the range that a field is the checksum of.
    """
    known = sorted(file.literals, key=lambda part: part.offset)
    starts = [part.offset for part in known]
    at = 0
    for field in sorted(file.crcs, key=lambda field: field.start):
        while at < len(sums) and sums[at][0] + sums[at][1] <= field.start:
            at += 1
        first = at
        while at < len(sums) and sums[at][0] < field.stop:
            at += 1
        near = known[max(0, bisect_right(starts, field.start) - 1) : bisect_left(starts, field.stop)]
        clipped = []
        for part in near:  # the parts of literals that are inside the field's range
            low, high = max(part.offset, field.start), min(part.offset + len(part.data), field.stop)
            if low < high:
                data = memoryview(part.data)[low - part.offset : high - part.offset]
                clipped.append((low, high - low, zlib_ng.crc32(data)))
        crc = combine_crcs(_with_zeros(field, sorted([*sums[first:at], *clipped])))
        for place in field.at:
            yield place, crc.to_bytes(4, "little")


def compute_file_crc(file: OutputFile, sums: Sequence[tuple[int, int, int]]) -> int:
    """CRC-32 of the whole `file` after its checksum fields are filled in; `sums`: as in `make_crc_patches`.

    The checksum fields must be inside literals.
    """
    literals = sorted(file.literals, key=lambda part: part.offset)
    starts = [part.offset for part in literals]
    filled = [bytearray(part.data) for part in literals]
    for place, data in make_crc_patches(file, sums):
        at = bisect_right(starts, place) - 1
        filled[at][place - starts[at] : place - starts[at] + len(data)] = data
    file_range = CrcField(start=0, stop=file.nbytes, at=())
    known = [(start, len(data), zlib_ng.crc32(data)) for start, data in zip(starts, filled, strict=True)]
    return combine_crcs(_with_zeros(file_range, sorted([*sums, *known])))


def _with_zeros(field: CrcField, sums: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    at = field.start
    for offset, nbytes, crc in sums:
        if offset < at or offset + nbytes > field.stop:
            raise CoverError(
                f"bytes {offset}:{offset + nbytes} are only partly inside the checksummed range at {field.start}"
            )
        yield crc_of_zeros(offset - at), offset - at
        yield crc, nbytes
        at = offset + nbytes
    yield crc_of_zeros(field.stop - at), field.stop - at
