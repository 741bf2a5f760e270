"""Where parameters start in a buffer of the distributed optimizer: by Megatron's rule, or found by looking.

The rule (param_and_grad_buffer.py, core_v0.16; optimizer/param_layout.py, core_v0.19): parameters in the reverse of
registration order; each starts at a multiple of 64 elements; a bucket is closed once it holds `bucket_size` elements,
and its end is padded to a multiple of `lcm(dp, 128)`; a tied embedding of a pipeline has a bucket of its own. Files
leave out the padding at the ends of buckets, so a parameter that opens a bucket follows the one before without a gap.

What a file does not say is the size of the buckets, and before 2024-07 nothing was aligned. So a layout is *walked*:
after a parameter the next one starts at the next multiple of 64 of its bucket, or right away. Which of the two it is,
the contents tell: `fitting(place)`. Parameters that are not trained are passed over. The first and the last walk in the
order of choices are the same only where there is no other (`matcher`).

>>> simulate([70, 60, 10], bucket_numel=100)
BufferLayout(starts=(124, 64, 0), numel=194)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

ALIGNMENT = 64
"""Elements to whose multiple a parameter is aligned, since 2024-07-01."""


class BufferPosition(NamedTuple):
    """Where a parameter starts."""

    segment: int
    """Which of the tensors that a buffer is stored in."""
    start: int
    """First element in it."""


class BufferLayout(NamedTuple):
    """Where every parameter starts."""

    starts: tuple[int, ...]
    """First element of each, in registration order."""
    numel: int
    """Elements of the whole."""


def bucket_multiple(dp: int, *, for_busbw: bool = False) -> int:
    """Elements to whose multiple a bucket is padded over `dp` ranks (`pad_buckets_for_high_nccl_busbw`).

    >>> bucket_multiple(6), bucket_multiple(2, for_busbw=True)
    (384, 65536)
    """
    return lcm(dp, 128, 2**16) if for_busbw else lcm(dp, 128)


def simulate(
    numels: Sequence[int],
    *,
    bucket_numel: int | None = None,
    apart: Collection[int] = (),
    alignment: int = ALIGNMENT,
) -> BufferLayout:
    """The layout that the rule gives for parameters of so many elements, in registration order.

    `bucket_numel`: elements from which a bucket is closed; None for one bucket. `apart`: numbers of the parameters that
    have a bucket of their own. `alignment`: elements to whose multiple the start of a parameter is padded.
    """
    starts = [0] * len(numels)
    begin = end = 0
    for number in reversed(range(len(numels))):
        starts[number] = start = begin + _padded(end - begin, alignment)
        if number in apart:
            begin = start
        end = start + numels[number]
        if number in apart or (bucket_numel is not None and end - begin >= bucket_numel):
            begin = end
    return BufferLayout(tuple(starts), end)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _Step(NamedTuple):
    """A parameter put in a place, and how far a walk has come with it."""

    place: BufferPosition | None
    """The place; None at the beginning and at the end of a walk."""
    number: int
    """The parameter; all after it are placed, or passed over."""
    segment: int
    """Segment of its end."""
    end: int
    """One past its last element."""
    begin: int
    """First element of its bucket."""

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What the rest of a walk depends on: only the phase of a bucket counts, not where it began."""
        return (self.number, self.segment, self.end, (self.end - self.begin) % ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ground:
    """What a walk goes over; all as in `walk`."""

    numels: Sequence[int]
    segments: Sequence[int]
    fitting: Callable[[BufferPosition], Iterable[int]]
    slack: int
    zeros: Container[int]

    def steps(self, at: _Step, *, last: bool) -> Iterator[_Step]:
        """Ways to go on: the parameter that is registered right before, first; with `last`, in the reverse order.

        What fits a parameter is taken for padding, at the end of a segment, only when nothing else leads to an end.
        """
        starts = list(self._starts(at))
        for follows in (False, True):
            found = [
                _Step(place, number, place.segment, place.start + self.numels[number], begin)
                for place, begin in starts
                if (place.segment != at.segment) == follows and place.segment < len(self.segments)
                for number in sorted((own for own in self.fitting(place) if own < at.number), reverse=True)
                if place.start + self.numels[number] <= self.segments[place.segment]
            ]
            yield from reversed(found) if last else found
        if at.segment >= len(self.segments) - 1 and sum(self.segments[at.segment :]) - at.end <= self.slack:
            yield at._replace(place=None)

    def _starts(self, at: _Step) -> Iterator[tuple[BufferPosition, int]]:
        """Where the next parameter may start, and where its bucket begins.

        Padding is zeros: it does not start where a parameter of other contents stands.
        """
        aligned = at.begin + _padded(at.end - at.begin, ALIGNMENT)
        at_end = self.fitting(BufferPosition(at.segment, at.end)) if at.segment < len(self.segments) else ()
        if aligned == at.end or all(own in self.zeros for own in at_end if own < at.number):
            yield BufferPosition(at.segment, aligned), at.begin
        if aligned != at.end:
            yield BufferPosition(at.segment, at.end), at.end
        if self.segments and self.segments[at.segment] - at.end <= self.slack:
            yield BufferPosition(at.segment + 1, 0), 0


def walk(
    numels: Sequence[int],
    segments: Sequence[int],
    fitting: Callable[[BufferPosition], Iterable[int]],
    *,
    slack: int = 0,
    zeros: Container[int] = (),
    last: bool = False,
) -> tuple[BufferPosition | None, ...] | None:
    """Where every parameter starts, or None when there is no such layout.

    Parameters
    ----------
    numels
        Elements of the parameters, in registration order.
    segments
        Elements of the tensors that the buffer is stored in: one, or (2023-10 to 2024-04) one per bucket.
    fitting
        Parameters whose elements stand at a place, by number.
    slack
        Elements that may be left over at the end of a segment, which is padding.
    zeros
        Parameters that are zero, as padding is.
    last
        Give the last walk in the order of choices, not the first. There is another layout where they differ.

    A parameter that is passed over is not in the buffer (it is not trained): its place is None.
    """
    ground = _Ground(numels=numels, segments=segments, fitting=fitting, slack=slack, zeros=zeros)
    trail = [_Step(None, len(numels), 0, 0, 0)]
    ways = [ground.steps(trail[0], last=last)]
    dead: set[tuple[int, int, int, int]] = set()
    while ways:  # depth first: two candidates seldom both hold, and a wrong one ends soon
        step = next((own for own in ways[-1] if own.place is None or own.key not in dead), None)
        if step is None:
            ways.pop()
            dead.add(trail.pop().key)
        elif step.place is None:
            placed = {own.number: own.place for own in trail}
            return tuple(placed.get(number) for number in range(len(numels)))
        else:
            trail.append(step)
            ways.append(ground.steps(step, last=last))
    return None
