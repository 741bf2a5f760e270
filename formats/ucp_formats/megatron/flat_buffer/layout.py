"""Where parameters start in a buffer of the distributed optimizer: by Megatron's rule, or found by looking.

The rule (param_and_grad_buffer.py, core_v0.16; optimizer/param_layout.py, core_v0.19): parameters in the reverse of
registration order; each starts at a multiple of 64 elements; a bucket is closed once it holds `bucket_size` elements,
and its end is padded to a multiple of `lcm(dp, 128)`; a tied embedding of a pipeline has a bucket of its own. Files
leave out the padding at the ends of buckets, so a parameter that opens a bucket follows the one before without a gap.

What a file does not say is the size of the buckets, and before 2024-07 nothing was aligned. So a layout is *walked*:
after a parameter the next one starts at the next multiple of 64 of its bucket, or right away. Which of the two it is,
the contents tell: `fitting(place)`. Parameters that are not trained are passed over. The first and the last walk in the
order of choices are the same only where there is no other (`ties`).

>>> rule = BufferRule(bucket_numel=100, bucket_multiple=128, alignment=64)
>>> simulate([70, 60, 10], rule)
BufferLayout(starts=(124, 64, 0), numel=194)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

__all__ = ["BufferLayout", "BufferRule", "Place", "bucket_multiple", "simulate", "walk"]

ALIGNMENT = 64
"""Elements to whose multiple a parameter is aligned, since 2024-07-01."""


class Place(NamedTuple):
    """Where a parameter starts."""

    segment: int
    """Which of the tensors that a buffer is stored in."""
    start: int
    """First element in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRule:
    """How a buffer is laid out."""

    bucket_numel: int | None = None
    """Elements from which a bucket is closed; None for one bucket."""
    bucket_multiple: int = 128
    """Elements to whose multiple the end of a bucket is padded."""
    alignment: int = ALIGNMENT
    """Elements to whose multiple the start of a parameter is padded."""
    keeps_padding: bool = False
    """Whether the padding at the end of a bucket is in the file too."""
    apart: frozenset[int] = frozenset()
    """Parameters that have a bucket of their own, by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
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


def simulate(numels: Sequence[int], rule: BufferRule) -> BufferLayout:
    """The layout that the rule gives for parameters of so many elements, in registration order."""
    starts = [0] * len(numels)
    buckets = _Buckets(rule)
    for number in reversed(range(len(numels))):
        starts[number] = buckets.add(numels[number], apart=number in rule.apart)
    return BufferLayout(starts=tuple(starts), numel=buckets.close())


class _Buckets:
    """A buffer as it fills; positions are those in the file."""

    def __init__(self, rule: BufferRule) -> None:
        self._rule = rule
        self._begin = 0
        self._end = 0

    def add(self, numel: int, *, apart: bool) -> int:
        """Place one parameter; gives its start."""
        start = self._begin + _padded(self._end - self._begin, self._rule.alignment)
        if apart and self._end > self._begin:
            self._end = start
            start = self.close()
        self._end = start + numel
        size = self._rule.bucket_numel
        if apart or (size is not None and self._end - self._begin >= size):
            self.close()
        return start

    def close(self) -> int:
        """End the bucket; gives where the next one begins."""
        if self._end > self._begin and self._rule.keeps_padding:
            self._end = self._begin + _padded(self._end - self._begin, self._rule.bucket_multiple)
        self._begin = self._end
        return self._begin


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _State(NamedTuple):
    """How far a walk has come."""

    number: int
    """Parameter that was placed last; all after it are placed, or passed over."""
    segment: int
    """Segment of its end."""
    end: int
    """One past its last element."""
    begin: int
    """First element of its bucket."""


class _Step(NamedTuple):
    """A parameter put in a place, or (without one) the end of the walk."""

    place: Place | None
    state: _State
    """How far the walk has come after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ground:
    """What a walk goes over."""

    numels: Sequence[int]
    segments: Sequence[int]
    fitting: Callable[[Place], Iterable[int]]
    slack: int
    zeros: Container[int]
    """As in `walk`."""

    def steps(self, state: _State, *, last: bool) -> Iterator[_Step]:
        """Ways to go on: the parameter that is registered right before, first; with `last`, in the reverse order.

        What fits a parameter is taken for padding, at the end of a segment, only when nothing else leads to an end.
        """
        own = [at for at in self._starts(state) if at[0] == state.segment]
        following = [at for at in self._starts(state) if at[0] != state.segment]
        for starts in (own, following):
            found = [step for at in starts for step in self._placed(state, at)]
            yield from reversed(found) if last else found
        if state.segment >= len(self.segments) - 1 and sum(self.segments[state.segment :]) - state.end <= self.slack:
            yield _Step(None, state)

    def _placed(self, state: _State, at: tuple[int, int, int]) -> Iterator[_Step]:
        segment, start, begin = at
        if segment < len(self.segments):
            fits = [number for number in self.fitting(Place(segment, start)) if number < state.number]
            for number in sorted(fits, reverse=True):
                stop = start + self.numels[number]
                if stop <= self.segments[segment]:
                    yield _Step(Place(segment, start), _State(number, segment, stop, begin))

    def _starts(self, state: _State) -> Iterator[tuple[int, int, int]]:
        """Segment, start and begin of the bucket for what comes next.

        Padding is zeros: it does not start where a parameter of other contents stands.
        """
        aligned = state.begin + _padded(state.end - state.begin, ALIGNMENT)
        at_end = self.fitting(Place(state.segment, state.end)) if state.segment < len(self.segments) else ()
        if aligned == state.end or all(own in self.zeros for own in at_end if own < state.number):
            yield state.segment, aligned, state.begin
        if aligned != state.end:
            yield state.segment, state.end, state.end
        if self.segments and self.segments[state.segment] - state.end <= self.slack:
            yield state.segment + 1, 0, 0


def walk(
    numels: Sequence[int],
    segments: Sequence[int],
    fitting: Callable[[Place], Iterable[int]],
    *,
    slack: int = 0,
    zeros: Container[int] = (),
    last: bool = False,
) -> tuple[Place | None, ...] | None:
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
    begun = _State(len(numels), 0, 0, 0)
    ways: list[Iterator[_Step]] = [ground.steps(begun, last=last)]
    trail: list[_Step] = []
    dead: set[tuple[int, int, int, int]] = set()
    while ways:  # depth first: two candidates seldom both hold, and a wrong one ends soon
        step = next((own for own in ways[-1] if own.place is None or _key(own.state) not in dead), None)
        if step is None:
            dead.add(_key(trail[-1].state if trail else begun))
            ways.pop()
            trail = trail[: max(len(ways) - 1, 0)]
        elif step.place is None:
            placed = {own.state.number: own.place for own in trail}
            return tuple(placed.get(number) for number in range(len(numels)))
        else:
            trail.append(step)
            ways.append(ground.steps(step.state, last=last))
    return None


def _key(state: _State) -> tuple[int, int, int, int]:
    """What the rest of a walk depends on: only the phase of a bucket counts, not where it began."""
    return (state.number, state.segment, state.end, (state.end - state.begin) % ALIGNMENT)
