"""Gathers the pieces of a slice in a buffer: the only place where tensor bytes are read.

Adjacent pieces of a file are read by one call, straight into place (`preadv`). Strided pieces are read in ranges of
bounded size, in file order and without long gaps, and then scattered. Casts and means are computed between the two;
patches change what was read (`ucp.transfer.patches`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, groupby, islice, repeat
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from zlib_ng import zlib_ng

from ucp.core.slices import Piece, block_ranges, in_file_order, runs_of
from ucp.core.tensor import DType, InlineTensor, TensorRef, contiguous_strides, list_offsets
from ucp.errors import CorruptError
from ucp.io.elements import add, assign, decode_block, enlarge, fraction_of, mean_dtype, numpy_dtype, strided, viewed
from ucp.io.files import Sources, join_ranges
from ucp.transfer.patches import Patcher, is_patch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ucp.io.remote.prefetch import Extent

T = TypeVar("T")
J = TypeVar("J")

MAX_READ = 8 << 20
"""The most bytes that are read at once for a strided or cast piece."""

RUN_OVERHEAD = 128
"""Bytes of memory that the offset of a run takes while it is read."""


_MAX_SPARSITY = 4
"""The most bytes of a range per byte that is used; sparser pieces are not prefetched as one range."""


class Span(NamedTuple):
    """A range of bytes that was read, with its checksum."""

    path: str
    """Source file."""
    offset: int
    """First byte."""
    nbytes: int
    """Number of bytes."""
    crc32: int
    """CRC-32 of the bytes."""


class ByteRun(NamedTuple):
    """Consecutive bytes of a source file that are copied unchanged."""

    path: str
    """Source file."""
    offset: int
    """First byte."""
    nbytes: int
    """Bytes."""
    continues: bool = False
    """Whether it continues the run before it."""

    def cut(self, nbytes: int) -> Iterator[ByteRun]:
        """The run in parts of at most `nbytes` bytes."""
        for low in range(0, self.nbytes, nbytes):
            yield ByteRun(self.path, self.offset + low, min(nbytes, self.nbytes - low), continues=low > 0)


@dataclass(slots=True)
class Gatherer:
    """Fills buffers from pieces, and keeps the checksums of what it read."""

    sources: Sources
    """Where files are opened."""
    tracked: frozenset[str] = frozenset()
    """Files whose bytes are checksummed as they are read, because their checksums are recorded."""
    patcher: Patcher = field(default_factory=Patcher)
    """Open patches, which several gatherers of one thread can share."""
    spans: list[Span] = field(default_factory=list)
    """What was read from tracked files."""
    nbytes_read: int = 0
    """Bytes read from all files."""
    _block: tuple[tuple[str, int], memoryview] | None = None
    """The last decoded block: the next pieces are often in it too."""

    def fill(self, buffer: memoryview, dtype: DType, pieces: Sequence[Piece]) -> None:
        """Fill `buffer`, whose elements are of `dtype`, from `pieces`."""
        self.fill_many([(buffer, dtype, pieces)])

    def read(self, requests: Sequence[tuple[int, DType, Sequence[Piece]]]) -> list[memoryview]:
        """Read several requests (elements, dtype, pieces) into one buffer; return a view of it for each."""
        data = memoryview(bytearray(sum(numel * dtype.itemsize for numel, dtype, _ in requests)))
        stops = list(accumulate(numel * dtype.itemsize for numel, dtype, _ in requests))
        views = [data[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        self.fill_many([(view, dtype, pieces) for view, (_, dtype, pieces) in zip(views, requests, strict=True)])
        return views

    def scan(self, path: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Read and checksum ranges (first byte, one past the last) that are near one another, in increasing order."""
        low, high = ranges[0][0], max(stop for _, stop in ranges)
        data = memoryview(bytearray(high - low))
        self.sources.get(path).read_into([data], low)
        self.nbytes_read += high - low
        for start, stop in ranges:
            self.spans.append(Span(path, start, stop - start, zlib_ng.crc32(data[start - low : stop - low])))

    def copy_runs(self, runs: Iterable[ByteRun], into: memoryview) -> Iterator[tuple[int, int]]:
        """Read runs one after another into a buffer; yield CRC-32 and bytes of each."""
        position = 0
        for run in runs:
            view = into[position : position + run.nbytes]
            position += run.nbytes
            self.sources.get(run.path).read_into((view,), run.offset)
            self.nbytes_read += run.nbytes
            crc = zlib_ng.crc32(view)
            yield crc, run.nbytes
            if run.path in self.tracked:
                span = Span(run.path, run.offset, run.nbytes, crc)
                self.spans.append(_concat_spans(self.spans.pop(), span) if run.continues else span)

    def fill_many(self, requests: Sequence[tuple[memoryview, DType, Sequence[Piece]]]) -> None:
        """`fill` for several buffers at once, so that reads of neighbours are joined."""
        direct: list[tuple[str, int, memoryview]] = []
        indirect: list[tuple[memoryview, DType, list[Piece]]] = []
        for buffer, dtype, pieces in requests:
            others: list[Piece] = []
            for piece in pieces:
                if not _is_direct(piece, dtype):
                    others.append(piece)
                    continue
                start = piece.dst_offset * dtype.itemsize
                view = buffer[start : start + piece.sizes[0] * dtype.itemsize]
                if isinstance(piece.ref, InlineTensor):
                    view[:] = piece.ref.data[piece.src_offset : piece.src_offset + view.nbytes]
                else:
                    direct.append((piece.ref.path, piece.ref.offset + piece.src_offset, view))
            if others:
                indirect.append((buffer, dtype, others))
        direct.sort(key=itemgetter(0, 1))
        for path, group in groupby(direct, key=itemgetter(0)):
            reads = list(group)
            views = iter([view for _, _, view in reads])
            for low, _, count in join_ranges((offset, offset + view.nbytes) for _, offset, view in reads):
                self._read(path, low, list(islice(views, count)))
        for buffer, dtype, others in indirect:
            if any(map(is_patch, others)):
                self.patcher.fill(self, buffer, dtype, others)
                continue
            terms = len({piece.term for piece in others})
            if terms > 1:
                self._fill_mean(buffer, dtype, others, terms)
                continue
            for part, values in chain.from_iterable(map(self.read_values, others)):
                assign(_scatter(buffer, dtype, part), values)

    def _read(self, path: str, offset: int, views: list[memoryview]) -> None:
        self.sources.get(path).read_into(views, offset)
        self.nbytes_read += sum(view.nbytes for view in views)
        if path in self.tracked:
            for view in views:
                self.spans.append(Span(path, offset, view.nbytes, zlib_ng.crc32(view)))
                offset += view.nbytes

    def _fill_mean(self, buffer: memoryview, dtype: DType, pieces: Sequence[Piece], terms: int) -> None:
        """Mean over `terms` terms: summed in their order, then divided; in float32 (as DeepSpeed 0.19.8) or wider.

        If the sum of finite terms is too large for that dtype, they are read once more and summed as fractions.
        """
        import numpy as np

        wide = mean_dtype(piece.ref.dtype for piece in pieces)
        total = np.zeros(buffer.nbytes // dtype.itemsize, dtype=numpy_dtype(wide))
        self._add_terms(total, wide, pieces)
        total /= terms
        mean = viewed(buffer, dtype)
        assign(mean, total)
        too_large = ~np.isfinite(total)
        if not too_large.any():
            return
        fraction = fraction_of(terms)
        total[:] = 0
        self._add_terms(total, wide, pieces, fraction=fraction)
        total /= terms
        enlarge(total, by=1 / fraction)
        mean[too_large] = total[too_large]

    def _add_terms(self, total: NDArray[Any], dtype: DType, pieces: Sequence[Piece], *, fraction: float = 1.0) -> None:
        """Add all terms, each multiplied by `fraction`, to `total`, whose elements are of `dtype`, in their order."""
        sums = total.data.cast("B")
        for piece in sorted(pieces, key=lambda piece: piece.term):
            for part, values in self.read_values(piece):
                add(_scatter(sums, dtype, part), values, fraction=fraction)

    def join_spans(self, boundaries: Container[tuple[str, int]]) -> None:
        """Join spans that follow one another, except across a place (file, offset) in `boundaries`."""
        joined: list[Span] = []
        for span in sorted(self.spans):
            last = joined[-1] if joined else span
            follows = last.path == span.path and last.offset + last.nbytes == span.offset
            if follows and (span.path, span.offset) not in boundaries:
                joined[-1] = _concat_spans(last, span)
            else:
                joined.append(span)
        self.spans = joined

    def read_values(self, piece: Piece) -> Iterator[tuple[Piece, NDArray[Any]]]:
        """The elements of a piece, in parts of bounded size, as (part, values)."""
        if isinstance(piece.ref, InlineTensor):
            yield piece, view_piece(memoryview(piece.ref.data), piece, piece.src_offset)
        elif piece.ref.codec:
            first = piece.ref.codec_start + piece.src_offset
            yield piece, view_piece(self._decode_block(piece.ref, first + piece.extent), piece, first)
        else:
            for part in _split_reads(in_file_order(piece)):
                yield part, self._read_part(part)

    def _read_part(self, part: Piece) -> NDArray[Any]:
        """The elements of a part, read by one call, run by run, into a buffer without the gaps between runs."""
        ref = part.ref
        assert isinstance(ref, TensorRef)
        lead, nbytes = runs_of(part)
        starts = list_offsets(part.sizes[:lead], part.src_strides[:lead], first=ref.offset + part.src_offset)
        scratch = memoryview(bytearray(nbytes * len(starts)))
        self.sources.get(ref.path).read_runs(scratch, starts)
        self.nbytes_read += len(scratch)
        if ref.path in self.tracked:
            crcs = [zlib_ng.crc32(scratch[at : at + nbytes]) for at in range(0, len(scratch), nbytes)]
            self.spans.extend(map(Span, repeat(ref.path), starts, repeat(nbytes), crcs))
        steps = tuple(step * nbytes for step in contiguous_strides(part.sizes[:lead]))
        return view_piece(scratch, replace(part, src_strides=(*steps, *part.src_strides[lead:])), 0)

    def _decode_block(self, ref: TensorRef, nbytes: int) -> memoryview:
        """The decoded block that contains `ref`. Raises CorruptError if it is damaged, or shorter than `nbytes`."""
        key = (ref.path, ref.offset)
        if self._block is None or self._block[0] != key:
            self._block = None  # so that only one block is in memory
            data = memoryview(bytearray(ref.codec_nbytes))
            self._read(ref.path, ref.offset, [data])
            try:
                self._block = key, decode_block(data, ref.codec)
            except CorruptError as error:
                raise CorruptError(f"{ref.path}, bytes {ref.offset}:{ref.offset + data.nbytes}: {error}") from error
        raw = self._block[1]
        if nbytes > raw.nbytes:
            raise CorruptError(
                f"{ref.path}: expected a compressed block of {nbytes} bytes or more at {ref.offset}; got {raw.nbytes}"
            )
        return raw


class ThreadedReader:
    """Threads that read; each opens the files that it needs."""

    def __init__(self, threads: int, *, tracked: frozenset[str] = frozenset()) -> None:
        """`tracked`: see `Gatherer`."""
        self._threads = threads
        self._tracked = tracked
        self._local = threading.local()
        self._gatherers: list[Gatherer] = []
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ucp-read")

    def submit(self, work: Callable[[Gatherer], T]) -> Future[T]:
        """Run a function on a thread, with the gatherer of that thread."""
        return self._pool.submit(lambda: work(self._gatherer()))

    def run_all(self, jobs: Iterable[J], work: Callable[[J, Gatherer], object]) -> None:
        """Run `work` for every job, one at a time on each thread. Raises the first failure."""
        queue = iter(jobs)
        running: set[Future[object]] = set()
        while True:
            some = islice(queue, self._threads - len(running))
            running |= {self.submit(partial(work, job)) for job in some}
            if not running:
                return
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                future.result()

    def scan(self, ranges: Iterable[tuple[str, int, int]]) -> list[Span]:
        """Read ranges (path, offset, bytes), in parts of bounded size, for their checksums. Raises SourceError."""

        def scan(path: str, low: int, high: int, gatherer: Gatherer) -> Span:
            gatherer.scan(path, [(low, high)])
            return gatherer.spans[-1]

        futures = [
            self.submit(partial(scan, path, *part))
            for path, offset, nbytes in ranges
            for part in block_ranges(offset, offset + nbytes, MAX_READ)
        ]
        return [future.result() for future in futures]

    def spans(self, boundaries: Container[tuple[str, int]]) -> list[Span]:
        """What was read from tracked files, joined except across places (file, offset) in `boundaries`."""
        joined = Gatherer(sources=Sources(), spans=[span for gatherer in self._gatherers for span in gatherer.spans])
        joined.join_spans(boundaries)
        return joined.spans

    @property
    def nbytes(self) -> int:
        """Bytes read so far."""
        return sum(gatherer.nbytes_read for gatherer in self._gatherers)

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._pool.shutdown(cancel_futures=True)
        for gatherer in self._gatherers:
            gatherer.sources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _gatherer(self) -> Gatherer:
        gatherer: Gatherer | None = getattr(self._local, "gatherer", None)
        if gatherer is None:
            gatherer = self._local.gatherer = Gatherer(sources=Sources(), tracked=self._tracked)
            self._gatherers.append(gatherer)
        return gatherer


def to_run(piece: Piece, dtype: DType) -> ByteRun | None:
    """The bytes of a piece in its file, if they can be copied to the slice as one unchanged run; else None."""
    ref = piece.ref
    if isinstance(ref, InlineTensor) or not _is_direct(piece, dtype):
        return None
    return ByteRun(ref.path, ref.offset + piece.src_offset, piece.sizes[0] * dtype.itemsize)


def to_extent(piece: Piece) -> Extent | None:
    """The range of a file to prefetch for a piece; None if the piece is inline, or uses too few bytes of the range."""
    from ucp.io.remote.prefetch import Extent

    ref = piece.ref
    if isinstance(ref, InlineTensor) or is_patch(piece):  # a patch is read as a stream
        return None
    if ref.codec:
        return Extent(ref.path, ref.offset, ref.offset + ref.codec_nbytes, ref.codec_nbytes)
    start, nbytes, extent = ref.offset + piece.src_offset, prod(piece.sizes) * ref.dtype.itemsize, piece.extent
    return None if nbytes * _MAX_SPARSITY < extent else Extent(ref.path, start, start + extent, nbytes)


def _concat_spans(span: Span, following: Span) -> Span:
    crc = zlib_ng.crc32_combine(span.crc32, following.crc32, following.nbytes)
    return Span(span.path, span.offset, span.nbytes + following.nbytes, crc)


def view_piece(data: memoryview, piece: Piece, offset: int) -> NDArray[Any]:
    """The elements of a piece as a view of `data`; `offset`: the byte of its first element there."""
    return strided(data, piece.ref.dtype, offset=offset, sizes=piece.sizes, strides=piece.src_strides)


def _is_direct(piece: Piece, dtype: DType) -> bool:
    """Whether a piece is copied unchanged, from consecutive bytes to consecutive elements of `dtype`."""
    ref = piece.ref
    if ref.dtype is not dtype or len(piece.sizes) != 1 or piece.mean or (isinstance(ref, TensorRef) and ref.codec):
        return False
    return piece.sizes[0] == 1 or (piece.src_strides[0] == dtype.itemsize and piece.dst_strides[0] == 1)


def _scatter(buffer: memoryview, dtype: DType, piece: Piece) -> NDArray[Any]:
    item = dtype.itemsize
    strides = tuple(step * item for step in piece.dst_strides)
    return strided(buffer, dtype, offset=piece.dst_offset * item, sizes=piece.sizes, strides=strides)


def _split_reads(piece: Piece) -> Iterator[Piece]:
    """Parts of a piece, in file order, for each of which at most `MAX_READ` bytes are read."""
    lead, nbytes = runs_of(piece)
    total = prod(piece.sizes[:lead]) * (nbytes + RUN_OVERHEAD) if lead else nbytes
    if total <= MAX_READ or piece.sizes == (1,):
        yield piece
    elif piece.sizes[0] == 1:
        sizes, src, dst = piece.sizes[1:], piece.src_strides[1:], piece.dst_strides[1:]
        yield from _split_reads(replace(piece, sizes=sizes, src_strides=src, dst_strides=dst))
    else:
        count, step = piece.sizes[0], piece.src_strides[0]
        rows = MAX_READ * count // total if lead else (MAX_READ - piece.extent) // step + count
        for low in range(0, count, max(rows, 1)):
            part = replace(
                piece,
                sizes=(min(max(rows, 1), count - low), *piece.sizes[1:]),
                src_offset=piece.src_offset + low * step,
                dst_offset=piece.dst_offset + low * piece.dst_strides[0],
            )
            yield from _split_reads(part)
