"""Who reads what: every byte that several ranks need is read by one of them, in equal shares.

What is carried is laid one after another into windows of bounded size, and every window is cut into as many parts as
there are readers. A cut may fall inside a tensor. The reader of a part reads it, in long stretches; then the parts are
gathered by all, in as many rounds as memory asks for.

A window goes on in the order it is given, which is that of the layers; within it, what is of one state lies together,
as it does in a flat source. It holds slices of one cost only, so that equal parts are equal amounts to read.

>>> from ucp.core.tensor import DType
>>> own = Slice(param="w", state="weight", dtype=DType.FLOAT32, pairs=(), local_shape=(6,), start=0, stop=6)
>>> (window,) = share_out([own], costs=[1.0], readers=2, part_nbytes=1 << 20)
>>> [[(segment.start, segment.stop) for segment in window.segments(reader)] for reader in range(2)]
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

    load: int
    """Position of the slice among all that are shared out."""
    start: int
    """First element, counted in the slice's local tensor."""
    stop: int
    """One past the last."""
    offset: int
    """Byte where they start: in the window, or in what was cut out of it."""
    itemsize: int
    """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return (self.stop - self.start) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is read at once, and gathered in one round or several."""

    laid: tuple[Segment, ...]
    """Everything in it, in increasing offset."""
    part_nbytes: int
    """Bytes that each reader reads, a multiple of `ALIGNMENT`; the last ones may have less."""
    round_nbytes: int
    """Bytes of a part that are gathered at once, a multiple of `ALIGNMENT`."""

    @property
    def rounds(self) -> int:
        """Gatherings."""
        return -(-self.part_nbytes // self.round_nbytes)

    def segments(self, reader: int, number: int = 0) -> Iterator[Segment]:
        """What `reader` reads for round `number`; offsets are counted in that round of the part."""
        low = reader * self.part_nbytes + number * self.round_nbytes
        high = min(low + self.round_nbytes, (reader + 1) * self.part_nbytes)
        at = max(bisect_right(self.laid, low, key=lambda own: own.offset) - 1, 0)
        while at < len(self.laid) and self.laid[at].offset < high:
            own = self.laid[at]
            first = max(low - own.offset, 0) // own.itemsize
            last = min(high - own.offset, own.nbytes) // own.itemsize
            if first < last:
                offset = own.offset + first * own.itemsize - low
                yield replace(own, start=own.start + first, stop=own.start + last, offset=offset)
            at += 1


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
    `ALIGNMENT` are taken. `round_nbytes`: most bytes of a part that are gathered at once; None for all of them. `done`:
    element from which on each is wanted.
    """
    room = max(part_nbytes // ALIGNMENT, 1) * ALIGNMENT * readers
    starts = done or [own.start for own in slices]
    order = sorted(range(len(slices)), key=lambda load: costs[load])
    for _, alike in groupby(order, key=lambda load: costs[load]):
        for some in _packed([(load, starts[load], slices[load]) for load in alike], room):
            laid: list[Segment] = []
            at = 0
            for own in sorted(some, key=lambda own: (slices[own.load].state, own.load)):
                laid.append(replace(own, offset=at))
                at += aligned(own.nbytes)
            part = aligned(-(-at // readers))
            most = max((round_nbytes or room) // ALIGNMENT, 1) * ALIGNMENT
            yield Window(laid=tuple(laid), part_nbytes=part, round_nbytes=min(most, part))


def _packed(own: Sequence[tuple[int, int, Slice]], room: int) -> Iterator[list[Segment]]:
    """The slices one after another, in stretches of at most `room` bytes."""
    some: list[Segment] = []
    left = room
    for load, first, piece in own:
        itemsize, start = piece.dtype.itemsize, first
        while start < piece.stop:
            if not left:
                yield some
                some, left = [], room
            stop = min(piece.stop, start + left // itemsize)
            some.append(Segment(load=load, start=start, stop=stop, offset=0, itemsize=itemsize))
            left -= aligned((stop - start) * itemsize)
            start = stop
    if some:
        yield some


def aligned(nbytes: int) -> int:
    """The least multiple of `ALIGNMENT` that has so many bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
