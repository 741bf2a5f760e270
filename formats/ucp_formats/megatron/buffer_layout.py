"""Where parameters start in a buffer of the distributed optimizer: by Megatron's rule, or found by looking.

The rule (param_and_grad_buffer.py, core_v0.16; optimizer/param_layout.py, core_v0.19): parameters in the reverse of
registration order; each starts at a multiple of 64 elements; a bucket is closed once it holds `bucket_size` elements,
and its end is padded to a multiple of `lcm(dp, 128)`; a tied embedding of a pipeline has a bucket of its own. Files
leave out the padding at the ends of buckets, so a parameter that opens a bucket follows the one before without a gap.

What a file does not say is the size of the buckets, and before 2024-07 nothing was aligned. So a layout is *walked*:
after a parameter the next one starts at the next multiple of 64 of its bucket, or right away. Which of the two it is,
the contents tell: `holds(parameter, place)`.

>>> rule = BufferRule(bucket_numel=100, bucket_multiple=128, alignment=64)
>>> simulate([70, 60, 10], rule)
BufferLayout(starts=(124, 64, 0), numel=194)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """Parameter that was placed last; all after it are placed, too."""
    segment: int
    """Segment of its end."""
    end: int
    """One past its last element."""
    begin: int
    """First element of its bucket."""


def walk(
    numels: Sequence[int],
    segments: Sequence[int],
    holds: Callable[[int, Place], bool],
    *,
    slack: int = 0,
) -> tuple[Place | None, ...] | None:
    """Where every parameter starts, or None when there is no such layout.

    Parameters
    ----------
    numels
        Elements of the parameters, in registration order.
    segments
        Elements of the tensors that the buffer is stored in: one, or (2023-10 to 2024-04) one per bucket.
    holds
        Whether the elements at a place are those of a parameter. Asked for places that lie within a segment.
    slack
        Elements that may be left over at the end of a segment, which is padding.

    A parameter that is found neither where it must be is not in the buffer (it is not trained): its place is None.
    """
    # depth first: two candidates seldom both hold, and a wrong one ends soon
    steps: list[tuple[_State, Iterator[tuple[Place | None, _State]]]] = []
    begun = _State(len(numels), 0, 0, 0)
    steps.append((begun, _next(begun, numels, segments, holds, slack)))
    places: list[Place | None] = []
    dead: set[tuple[int, int, int, int]] = set()
    while steps:
        state, options = steps[-1]
        if state.number == 0 and _is_full(state, segments, slack):
            return tuple(reversed(places))
        for place, following in options:
            if _key(following) not in dead:
                places.append(place)
                steps.append((following, _next(following, numels, segments, holds, slack)))
                break
        else:
            dead.add(_key(state))
            steps.pop()
            if places:
                places.pop()
    return None


def _key(state: _State) -> tuple[int, int, int, int]:
    """What the rest of a walk depends on: only the phase of a bucket counts, not where it began."""
    return (state.number, state.segment, state.end, state.begin % ALIGNMENT)


def _is_full(state: _State, segments: Sequence[int], slack: int) -> bool:
    return state.segment >= len(segments) - 1 and sum(segments[state.segment :]) - state.end <= slack


def _next(
    state: _State,
    numels: Sequence[int],
    segments: Sequence[int],
    holds: Callable[[int, Place], bool],
    slack: int,
) -> Iterator[tuple[Place | None, _State]]:
    """Places that the parameter before can have, most likely first; last, that it is not there."""
    if state.number == 0:
        return
    number = state.number - 1
    found = False
    for segment, start, begin in _candidates(state, segments, slack):
        stop = start + numels[number]
        if segment < len(segments) and stop <= segments[segment] and holds(number, Place(segment, start)):
            found = True
            yield Place(segment, start), _State(number, segment, stop, begin)
    if not found:
        yield None, state._replace(number=number)


def _candidates(state: _State, segments: Sequence[int], slack: int) -> Iterator[tuple[int, int, int]]:
    """Segment, start and begin of the bucket for what comes next."""
    aligned = state.begin + _padded(state.end - state.begin, ALIGNMENT)
    yield state.segment, aligned, state.begin
    if aligned != state.end:
        yield state.segment, state.end, state.end
    if segments and segments[state.segment] - state.end <= slack:
        yield state.segment + 1, 0, 0
