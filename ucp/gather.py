"""Bring the pieces of a slice together in a buffer: the only place where tensor bytes are read.

Pieces that lie one after another in a file are read by one call, straight to their places (`preadv`). Strided
pieces are read in stretches of bounded size and scattered; casts and means are done on the way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from zlib_ng import zlib_ng

from ucp.codec import decode
from ucp.dtypes import DType
from ucp.errors import CorruptError
from ucp.io.source import SourceFile, open_source
from ucp.numeric import add, assign, enlarge, fraction_of, mean_dtype, numpy_dtype, strided, viewed
from ucp.slice import Piece
from ucp.tensor import InlineTensor, TensorRef

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Gatherer", "Sources", "Span", "piece_values"]

STRETCH = 8 << 20
"""Most bytes read at once for a strided or cast piece."""

SPARSE = 64 << 10
"""A run of at least so many bytes is worth a read of its own when the gaps between runs are larger than the runs."""

OPEN_FILES = 128
"""Most source files held open by one worker."""


class Span(NamedTuple):
    """Bytes that were read, with their checksum."""

    path: str
    """Source file."""
    offset: int
    """First byte."""
    nbytes: int
    """Bytes."""
    crc32: int
    """CRC-32 of them."""


class Sources:
    """Open source files of one thread, the least recently used closed first."""

    def __init__(self, limit: int = OPEN_FILES) -> None:
        self._limit = limit
        self._open: OrderedDict[str, SourceFile] = OrderedDict()

    def get(self, path: str) -> SourceFile:
        """The file at `path`, opened if it is not open."""
        file = self._open.get(path)
        if file is None:
            file = self._open[path] = open_source(path)
            if len(self._open) > self._limit:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(path)
        return file

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()


@dataclass(slots=True)
class Gatherer:
    """Fills buffers from pieces, and keeps the checksums of what it read."""

    sources: Sources
    """Where files are opened."""
    tracked: frozenset[str] = frozenset()
    """Files whose reads are summed, because checksums of theirs are recorded."""
    spans: list[Span] = field(default_factory=list)
    """What was read of tracked files."""
    nbytes_read: int = 0
    """Bytes read, of all files."""
    _block: tuple[tuple[str, int], memoryview] | None = None
    """The block decoded last, by file and offset: a block is several pieces where it does not end with a row."""

    def fill(self, buffer: memoryview, dtype: DType, pieces: Sequence[Piece], at: int = 0) -> None:
        """Put `pieces` into `buffer`, elements of `dtype`, positions counted from byte `at`."""
        self.fill_many([(buffer[at:], dtype, pieces)])

    def scan(self, path: str, offset: int, nbytes: int) -> None:
        """Read bytes only for their checksum."""
        self._read(path, offset, [memoryview(bytearray(nbytes))])

    def fill_many(self, wanted: Sequence[tuple[memoryview, DType, Sequence[Piece]]]) -> None:
        """`fill` for several buffers at once, so that reads of neighbours are joined."""
        direct: list[tuple[TensorRef, int, memoryview]] = []
        for buffer, dtype, pieces in wanted:
            for piece in pieces:
                view = _direct_view(piece, dtype, buffer)
                if view is None:
                    continue
                if isinstance(piece.ref, InlineTensor):
                    view[:] = piece.ref.data[piece.src_offset : piece.src_offset + view.nbytes]
                else:
                    direct.append((piece.ref, piece.ref.offset + piece.src_offset, view))
        direct.sort(key=lambda item: (item[0].path, item[1]))
        for path, offset, views in _joined(direct):
            self._read(path, offset, views)
        for buffer, dtype, pieces in wanted:
            self._fill_indirect(buffer, dtype, [p for p in pieces if _direct_view(p, dtype, buffer) is None])

    def _read(self, path: str, offset: int, views: list[memoryview]) -> None:
        self.sources.get(path).read_into(views, offset)
        self.nbytes_read += sum(view.nbytes for view in views)
        if path in self.tracked:
            for view in views:
                self.spans.append(Span(path, offset, view.nbytes, zlib_ng.crc32(view)))
                offset += view.nbytes

    def _fill_indirect(self, buffer: memoryview, dtype: DType, pieces: Sequence[Piece]) -> None:
        terms = sorted({piece.term for piece in pieces})
        if len(terms) > 1:
            self._fill_mean(buffer, dtype, pieces, terms)
            return
        for piece in pieces:
            for part, values in self.values(piece):
                assign(_scatter(buffer, dtype, part), values)

    def _fill_mean(self, buffer: memoryview, dtype: DType, pieces: Sequence[Piece], terms: Sequence[int]) -> None:
        """Mean over terms: summed in their order, then divided; in float32 (as DeepSpeed 0.19.8) or wider.

        Where finite terms have a sum too large for that type, they are read once more and summed as fractions.
        """
        import numpy as np

        wide = mean_dtype(piece.ref.dtype for piece in pieces)
        total = np.zeros(buffer.nbytes // dtype.itemsize, dtype=numpy_dtype(wide))
        self._add_terms(total, wide, pieces, terms)
        total /= len(terms)
        mean = viewed(buffer, dtype)
        assign(mean, total)
        too_large = ~np.isfinite(total)
        if not too_large.any():
            return
        fraction = fraction_of(len(terms))
        total[:] = 0
        self._add_terms(total, wide, pieces, terms, fraction=fraction)
        total /= len(terms)
        enlarge(total, by=1 / fraction)
        mean[too_large] = total[too_large]

    def _add_terms(
        self, total: NDArray[Any], dtype: DType, pieces: Sequence[Piece], terms: Sequence[int], *, fraction: float = 1.0
    ) -> None:
        """Add that fraction of all terms to `total`, elements of `dtype`, in the order of the terms."""
        sums = total.data.cast("B")
        for term in terms:
            for piece in pieces:
                if piece.term == term:
                    for part, values in self.values(piece):
                        add(_scatter(sums, dtype, part), values, fraction=fraction)

    def values(self, piece: Piece) -> Iterator[tuple[Piece, NDArray[Any]]]:
        """The elements of a piece, in stretches of bounded size: (the part of the piece, its values)."""
        if isinstance(piece.ref, InlineTensor):
            yield piece, piece_values(memoryview(piece.ref.data), piece, piece.src_offset)
        elif piece.ref.codec:
            yield piece, piece_values(self._decoded(piece), piece, piece.ref.codec_start + piece.src_offset)
        else:
            for part in _stretches(_in_file_order(piece)):
                scratch = memoryview(bytearray(_extent(part)))
                self._read(piece.ref.path, piece.ref.offset + part.src_offset, [scratch])
                yield part, piece_values(scratch, part, 0)

    def _decoded(self, piece: Piece) -> memoryview:
        """The whole block that holds an encoded piece."""
        ref = piece.ref
        assert isinstance(ref, TensorRef)  # an inline tensor has no codec
        key = (ref.path, ref.offset)
        raw = self._block[1] if self._block and self._block[0] == key else self._read_block(ref)
        self._block = key, raw
        needed = ref.codec_start + piece.src_offset + _extent(piece)
        if needed > raw.nbytes:
            raise CorruptError(
                f"{ref.path}: expected a compressed block of {needed} bytes or more at {ref.offset}; got {raw.nbytes}"
            )
        return raw

    def _read_block(self, ref: TensorRef) -> memoryview:
        self._block = None  # one block at a time in memory
        data = memoryview(bytearray(ref.codec_nbytes))
        self._read(ref.path, ref.offset, [data])
        try:
            return decode(data, ref.codec)
        except CorruptError as error:
            raise CorruptError(f"{ref.path}, bytes {ref.offset}:{ref.offset + ref.codec_nbytes}: {error}") from error


def piece_values(data: memoryview, piece: Piece, offset: int) -> NDArray[Any]:
    """View of a piece's elements in source bytes whose first element stands at `offset`."""
    return strided(data, piece.ref.dtype, offset=offset, sizes=piece.sizes, strides=piece.src_strides)


def _direct_view(piece: Piece, dtype: DType, buffer: memoryview) -> memoryview | None:
    """Where the piece's bytes go, if they are consecutive on both sides and need no change; else None."""
    ref = piece.ref
    if ref.dtype is not dtype or len(piece.sizes) != 1 or piece.mean or (isinstance(ref, TensorRef) and ref.codec):
        return None
    if piece.sizes[0] > 1 and (piece.src_strides[0] != dtype.itemsize or piece.dst_strides[0] != 1):
        return None
    start = piece.dst_offset * dtype.itemsize
    return buffer[start : start + piece.sizes[0] * dtype.itemsize]


def _joined(direct: Sequence[tuple[TensorRef, int, memoryview]]) -> Iterator[tuple[str, int, list[memoryview]]]:
    """Neighbours in a file as one read: (path, offset, buffers in order)."""
    path, start, stop = "", 0, -1
    views: list[memoryview] = []
    for ref, offset, view in direct:
        if ref.path != path or offset != stop:
            if views:
                yield path, start, views
            path, start, views = ref.path, offset, []
            stop = offset
        views.append(view)
        stop += view.nbytes
    if views:
        yield path, start, views


def _scatter(buffer: memoryview, dtype: DType, piece: Piece) -> NDArray[Any]:
    item = dtype.itemsize
    strides = tuple(step * item for step in piece.dst_strides)
    return strided(buffer, dtype, offset=piece.dst_offset * item, sizes=piece.sizes, strides=strides)


def _extent(piece: Piece) -> int:
    """Source bytes from the first to the last element of a piece."""
    reach = sum((n - 1) * s for n, s in zip(piece.sizes, piece.src_strides, strict=True))
    return reach + piece.ref.dtype.itemsize


def _in_file_order(piece: Piece) -> Piece:
    """The same copy with the longest source step first: cut along it, a transposed source is read once, not per row."""
    order = sorted(range(len(piece.sizes)), key=lambda dim: -piece.src_strides[dim])
    return replace(
        piece,
        sizes=tuple(piece.sizes[dim] for dim in order),
        src_strides=tuple(piece.src_strides[dim] for dim in order),
        dst_strides=tuple(piece.dst_strides[dim] for dim in order),
    )


def _stretches(piece: Piece) -> Iterator[Piece]:
    """Parts of a piece, in file order, that are each read by one call of at most `STRETCH` bytes."""
    extent = _extent(piece)
    payload = prod(piece.sizes) * piece.ref.dtype.itemsize
    inner = extent - (piece.sizes[0] - 1) * piece.src_strides[0]
    sparse = extent > 2 * payload and inner >= SPARSE
    if piece.sizes[0] > 1 and (extent > STRETCH or sparse):
        rows = 1 if sparse else max(1, (STRETCH - inner) // piece.src_strides[0] + 1)
        for low in range(0, piece.sizes[0], rows):
            yield from _stretches(_rows(piece, low, min(low + rows, piece.sizes[0])))
    elif extent > STRETCH and len(piece.sizes) > 1:
        yield from _stretches(_dropped(piece))
    else:
        yield piece


def _rows(piece: Piece, low: int, high: int) -> Piece:
    return replace(
        piece,
        sizes=(high - low, *piece.sizes[1:]),
        src_offset=piece.src_offset + low * piece.src_strides[0],
        dst_offset=piece.dst_offset + low * piece.dst_strides[0],
    )


def _dropped(piece: Piece) -> Piece:
    """A piece whose first dim is one element long, without that dim."""
    return replace(piece, sizes=piece.sizes[1:], src_strides=piece.src_strides[1:], dst_strides=piece.dst_strides[1:])
