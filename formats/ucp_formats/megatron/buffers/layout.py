"""Where parameters start in a buffer of the distributed optimizer: by Megatron's rule, or found by a walk.

The rule (param_and_grad_buffer.py, core_v0.16; optimizer/param_layout.py, core_v0.19): parameters are in the reverse of
registration order; each starts at a multiple of 64 elements; a bucket is closed once it holds `bucket_size` elements,
and its end is padded to a multiple of `lcm(dp, 128)`; a tied embedding of a pipeline has a bucket of its own. Files
leave out the padding at the ends of buckets, so a parameter that opens a bucket directly follows the one before.

Files do not record the size of buckets, and before 2024-07 nothing was aligned. So the buffer is *walked*: after a
parameter, the next one starts at the next multiple of 64 of its bucket, or right away; the contents tell which. Frozen
parameters are passed over. The layout is the only one if the first and the last walk in the order of choices are equal.

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
    """Number of the tensor, of those that the buffer is stored in."""
    start: int
    """First element in it."""


class BufferLayout(NamedTuple):
    """Where every parameter starts."""

    starts: tuple[int, ...]
    """First element of each, in registration order."""
    numel: int
    """Elements of the buffer."""


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
    separate: Collection[int] = (),
    alignment: int = ALIGNMENT,
) -> BufferLayout:
    """The layout of parameters of so many elements, in registration order, by the rule.

    `bucket_numel`: elements from which a bucket is closed; None for one bucket. `separate`: numbers of the parameters
    that have a bucket of their own. `alignment`: elements to whose multiple the start of a parameter is padded.
    """
    starts = [0] * len(numels)
    begin = end = 0
    for number in reversed(range(len(numels))):
        starts[number] = start = begin + _pad(end - begin, alignment)
        if number in separate:
            begin = start
        end = start + numels[number]
        if number in separate or (bucket_numel is not None and end - begin >= bucket_numel):
            begin = end
    return BufferLayout(tuple(starts), end)


def _pad(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _Step(NamedTuple):
    """A parameter at a position, and how far a walk has come with it."""

    position: BufferPosition | None
    """The position; None at the beginning and at the end of a walk."""
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
class _Terrain:
    """What a walk goes over; all as in `walk`."""

    numels: Sequence[int]
    segments: Sequence[int]
    find_params: Callable[[BufferPosition], Iterable[int]]
    slack: int
    zeros: Container[int]

    def next_steps(self, step: _Step, *, last: bool) -> Iterator[_Step]:
        """Possible next steps: the parameter registered right before comes first; with `last`, in reverse order.

        Elements at the end of a segment that match a parameter are taken for padding only if nothing else leads to an
        end.
        """
        starts = list(self._next_starts(step))
        for is_next_segment in (False, True):
            steps = [
                _Step(position, number, position.segment, position.start + self.numels[number], begin)
                for position, begin in starts
                if (position.segment != step.segment) == is_next_segment and position.segment < len(self.segments)
                for number in sorted((n for n in self.find_params(position) if n < step.number), reverse=True)
                if position.start + self.numels[number] <= self.segments[position.segment]
            ]
            yield from reversed(steps) if last else steps
        if step.segment >= len(self.segments) - 1 and sum(self.segments[step.segment :]) - step.end <= self.slack:
            yield step._replace(position=None)

    def _next_starts(self, step: _Step) -> Iterator[tuple[BufferPosition, int]]:
        """Where the next parameter may start, and where its bucket begins.

        Padding is zeros, so a parameter of other contents shows that there is none.
        """
        segment, end = step.segment, step.end
        aligned = step.begin + _pad(end - step.begin, ALIGNMENT)
        at_end = self.find_params(BufferPosition(segment, end)) if segment < len(self.segments) else ()
        if aligned == end or all(number in self.zeros for number in at_end if number < step.number):
            yield BufferPosition(segment, aligned), step.begin
        if aligned != end:
            yield BufferPosition(segment, end), end
        if self.segments and self.segments[segment] - end <= self.slack:
            yield BufferPosition(segment + 1, 0), 0


def walk(
    numels: Sequence[int],
    segments: Sequence[int],
    find_params: Callable[[BufferPosition], Iterable[int]],
    *,
    slack: int = 0,
    zeros: Container[int] = (),
    last: bool = False,
) -> tuple[BufferPosition | None, ...] | None:
    """Where every parameter starts, None for a frozen one, which is not in the buffer; or None if there is no layout.

    Parameters
    ----------
    numels
        Elements of the parameters, in registration order.
    segments
        Elements of the tensors that the buffer is stored in: one, or (2023-10 to 2024-04) one per bucket.
    find_params
        Numbers of the parameters whose elements are stored at a position.
    slack
        Elements of padding at the end of a segment, at most.
    zeros
        Parameters that are zero, as padding is.
    last
        Return the last walk in the order of choices, not the first. If they differ, there is another layout.
    """
    terrain = _Terrain(numels=numels, segments=segments, find_params=find_params, slack=slack, zeros=zeros)
    path = [_Step(None, len(numels), 0, 0, 0)]
    branches = [terrain.next_steps(path[0], last=last)]
    dead_ends: set[tuple[int, int, int, int]] = set()
    while branches:  # depth first: two parameters seldom both match, and a wrong one ends soon
        step = next((step for step in branches[-1] if step.position is None or step.key not in dead_ends), None)
        if step is None:
            branches.pop()
            dead_ends.add(path.pop().key)
        elif step.position is None:
            positions = {placed.number: placed.position for placed in path}
            return tuple(positions.get(number) for number in range(len(numels)))
        else:
            path.append(step)
            branches.append(terrain.next_steps(step, last=last))
    return None
