"""Which rank reads which bytes: every byte that several ranks need is read by one of them, in equal shares.

Slices are packed into windows of bounded size, and every window is divided into one part per reader; a part may begin
inside a tensor. Each reader reads its part in long ranges; then all gather the parts, in as many rounds as memory
requires.

Windows follow the order of the slices, which is that of the layers; within a window the slices of one state are
adjacent, as they are in flat buffers of a source. A window holds slices of equal cost, so that equal parts take
equally long.

>>> from ucp.core.tensor import DType
>>> piece = Slice(param="w", state="weight", dtype=DType.FLOAT32, pairs=(), local_shape=(6,), start=0, stop=6)
>>> (window,) = share_out([piece], costs=[1.0], readers=2, part_nbytes=1 << 20)
>>> [[(segment.start, segment.stop) for segment in window.read_by(reader)] for reader in range(2)]
[[(0, 4)], [(4, 6)]]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ucp.core.target import Slice

ALIGNMENT = 16
"""Bytes; a multiple of every itemsize, so that a part never ends inside an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Elements of one slice."""

    slice_number: int
    """Position of the slice in the list given to `share_out`."""
    start: int
    """First element, counted in the slice's local tensor."""
    stop: int
    """One past the last."""
    offset: int
    """Byte at which they start: in the window, or in the round of a part."""
    itemsize: int
    """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Size of the segment in bytes."""
        return (self.stop - self.start) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is read at once, and gathered in one round or several."""

    segments: tuple[Segment, ...]
    """Everything in it, in increasing offset."""
    part_nbytes: int
    """Bytes that each reader reads, a multiple of `ALIGNMENT`; the last readers may have less."""
    round_nbytes: int
    """Bytes of a part that are gathered at once, a multiple of `ALIGNMENT`."""

    @property
    def rounds(self) -> int:
        """How often parts are gathered."""
        return -(-self.part_nbytes // self.round_nbytes)

    def read_by(self, reader: int, round_number: int = 0) -> Iterator[Segment]:
        """What `reader` reads for a round; offsets are counted in that round of the part."""
        low = reader * self.part_nbytes + round_number * self.round_nbytes
        high = min(low + self.round_nbytes, (reader + 1) * self.part_nbytes)
        first = max(bisect_right(self.segments, low, key=lambda segment: segment.offset) - 1, 0)
        for segment in self.segments[first:]:
            if segment.offset >= high:
                return
            begin = max(low - segment.offset, 0) // segment.itemsize
            end = min(high - segment.offset, segment.nbytes) // segment.itemsize
            if begin < end:
                offset = segment.offset + begin * segment.itemsize - low
                yield replace(segment, start=segment.start + begin, stop=segment.start + end, offset=offset)


def share_out(
    slices: Sequence[Slice],
    *,
    costs: Sequence[float],
    readers: int,
    part_nbytes: int,
    round_nbytes: int | None = None,
    done: Sequence[int] = (),
) -> Iterator[Window]:
    """Windows that hold every element of `slices` once.

    `costs`: source bytes to read for a byte of each slice. `part_nbytes`: most bytes for each reader; at least
    `ALIGNMENT` are taken. `round_nbytes`: most bytes of a part that are gathered at once; None for all. `done`: first
    element of each slice that is still to be read.
    """
    window_nbytes = max(part_nbytes // ALIGNMENT, 1) * ALIGNMENT * readers
    starts = done or [piece.start for piece in slices]
    order = sorted(range(len(slices)), key=lambda number: costs[number])
    for _, numbers in groupby(order, key=lambda number: costs[number]):
        for batch in _pack([(number, starts[number], slices[number]) for number in numbers], window_nbytes):
            segments: list[Segment] = []
            offset = 0
            for segment in sorted(batch, key=lambda part: (slices[part.slice_number].state, part.slice_number)):
                segments.append(replace(segment, offset=offset))
                offset += align(segment.nbytes)
            part = align(-(-offset // readers))
            most = max((round_nbytes or window_nbytes) // ALIGNMENT, 1) * ALIGNMENT
            yield Window(segments=tuple(segments), part_nbytes=part, round_nbytes=min(most, part))


def _pack(slices: Sequence[tuple[int, int, Slice]], batch_nbytes: int) -> Iterator[list[Segment]]:
    """Slices (number, first element, slice) one after another, in batches of at most `batch_nbytes`."""
    batch: list[Segment] = []
    free = batch_nbytes
    for number, first, piece in slices:
        itemsize, start = piece.dtype.itemsize, first
        while start < piece.stop:
            if not free:
                yield batch
                batch, free = [], batch_nbytes
            stop = min(piece.stop, start + free // itemsize)
            batch.append(Segment(slice_number=number, start=start, stop=stop, offset=0, itemsize=itemsize))
            free -= align((stop - start) * itemsize)
            start = stop
    if batch:
        yield batch


def align(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
