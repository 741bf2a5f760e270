"""Where parameters start in a buffer of the distributed optimizer: by Megatron's rule, or by a search.

The rule (param_and_grad_buffer.py, core_v0.16; optimizer/param_layout.py, core_v0.19): parameters are in the reverse of
registration order; each starts at a multiple of 64 elements; a bucket is closed once it holds `bucket_size` elements,
and its end is padded to a multiple of `lcm(dp, 128)`. With pipeline parallelism, a tied embedding has a separate
bucket. Files leave out the padding at the ends of buckets, so the first parameter of a bucket directly follows the last
one of the bucket before.

Files do not record the size of buckets, and before 2024-07 parameters were not aligned. So `walk` searches the buffer
from its start: the next parameter starts at the next multiple of 64 elements in the bucket, or directly after the
previous parameter. The contents decide. Frozen parameters are skipped. The search runs twice and tries the choices in
opposite orders: if both runs find the same layout, no other layout fits.

>>> simulate([70, 60, 10], bucket_numel=100)
BufferLayout(starts=(124, 64, 0), numel=194)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

ALIGNMENT = 64
"""Parameters start at multiples of this number of elements, since 2024-07-01."""


class BufferPosition(NamedTuple):
    """Where a parameter starts."""

    segment: int
    """Number of the tensor, if the buffer is stored in several."""
    start: int
    """First element, in that tensor."""


class BufferLayout(NamedTuple):
    """Where every parameter starts."""

    starts: tuple[int, ...]
    """First element of each, in registration order."""
    numel: int
    """Elements of the buffer."""


def bucket_multiple(dp: int, *, for_busbw: bool = False) -> int:
    """The multiple to which a bucket is padded over `dp` ranks, in elements.

    `for_busbw`: whether the run set `pad_buckets_for_high_nccl_busbw`.

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
    """The layout that Megatron's rule gives to parameters of `numels` elements, in registration order.

    `bucket_numel`: a bucket is closed once it holds this many elements; None for a single bucket. `separate`: numbers
    of the parameters that have a separate bucket. `alignment`: parameters start at multiples of this many elements.
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


class _LayoutStep(NamedTuple):
    """One step of a walk: a parameter is placed at a position."""

    position: BufferPosition | None
    """The position; None at the beginning and at the end of a walk."""
    number: int
    """The parameter; all that were registered after it are placed or skipped."""
    segment: int
    """Segment in which it ends."""
    end: int
    """One past its last element."""
    begin: int
    """First element of its bucket."""

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What the rest of a walk depends on; of the bucket's start, only its offset modulo the alignment matters."""
        return (self.number, self.segment, self.end, (self.end - self.begin) % ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WalkInputs:
    """Inputs of a walk; the fields are those of `walk`."""

    numels: Sequence[int]
    segments: Sequence[int]
    find_params: Callable[[BufferPosition], Iterable[int]]
    slack: int
    zeros: Container[int]

    def next_steps(self, step: _LayoutStep, *, last: bool) -> Iterator[_LayoutStep]:
        """Possible next steps. The parameter registered right before is tried first; with `last`, it is tried last.

        Elements at the end of a segment that match a parameter count as padding only if no other choice gives a
        complete layout.
        """
        starts = list(self._next_starts(step))
        for is_next_segment in (False, True):
            steps = [
                _LayoutStep(position, number, position.segment, position.start + self.numels[number], begin)
                for position, begin in starts
                if (position.segment != step.segment) == is_next_segment and position.segment < len(self.segments)
                for number in sorted((n for n in self.find_params(position) if n < step.number), reverse=True)
                if position.start + self.numels[number] <= self.segments[position.segment]
            ]
            yield from reversed(steps) if last else steps
        if step.segment >= len(self.segments) - 1 and sum(self.segments[step.segment :]) - step.end <= self.slack:
            yield step._replace(position=None)

    def _next_starts(self, step: _LayoutStep) -> Iterator[tuple[BufferPosition, int]]:
        """Where the next parameter may start, and where its bucket begins.

        Padding is zeros. So there is none if a parameter that is not all zeros matches directly after the last one.
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
    """Where every parameter starts (None for a frozen one, which is not in the buffer); None if no layout fits.

    Parameters
    ----------
    numels
        Elements of the parameters, in registration order.
    segments
        Lengths of the tensors that store the buffer: one tensor, or (2023-10 to 2024-04) one per bucket.
    find_params
        Gives the numbers of the parameters whose contents are stored from a position on.
    slack
        Elements of padding at the end of a segment, at most.
    zeros
        Numbers of the parameters that start with zeros, as padding does.
    last
        Return the last layout in the order of choices, not the first. If the two differ, several layouts fit.
    """
    inputs = _WalkInputs(numels=numels, segments=segments, find_params=find_params, slack=slack, zeros=zeros)
    path = [_LayoutStep(None, len(numels), 0, 0, 0)]
    branches = [inputs.next_steps(path[0], last=last)]
    dead_ends: set[tuple[int, int, int, int]] = set()
    while branches:  # depth first: two matches are rare, and a wrong one soon leads to a dead end
        step = next((step for step in branches[-1] if step.position is None or step.key not in dead_ends), None)
        if step is None:
            branches.pop()
            dead_ends.add(path.pop().key)
        elif step.position is None:
            positions = {placed.number: placed.position for placed in path}
            return tuple(positions.get(number) for number in range(len(numels)))
        else:
            path.append(step)
            branches.append(inputs.next_steps(step, last=last))
    return None
