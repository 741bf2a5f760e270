"""How DeepSpeed cuts parameters over the data-parallel ranks: the arithmetic, for reading and for writing.

Stages 1 and 2 (and BF16_Optimizer), `FlatGroup`: the parameters of an optimizer group stand one after another in one
flat buffer, padded at its end to a multiple of 2 * ranks elements, and each rank holds an equal share of the buffer.
A parameter may lie across many ranks.

Stage 3, `chunk_range`: each parameter is cut alone, into chunks of ceil(numel / ranks) elements, and the chunks of
a rank stand one after another in one flat tensor per sub-group.

>>> group = flat_group([("a", 5), ("b", 2)], ranks=2)
>>> group.partition, [list(group.held(rank)) == [] for rank in (0, 1)]
(4, [False, False])
>>> [(held.name, held.start, held.stop, held.offset) for held in group.held(1)]
[('a', 4, 5, 0), ('b', 0, 2, 1)]
>>> [chunk_range(5, ranks=4, rank=rank) for rank in range(4)]
[(0, 2), (2, 4), (4, 5), (5, 5)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

__all__ = [
    "FlatGroup",
    "Held",
    "alignment_paddings",
    "chunk",
    "chunk_range",
    "chunked",
    "flat_group",
    "round_robin",
    "sub_groups",
]

START_ALIGNMENT = 2
"""Elements; `nccl_start_alignment_factor` of stage_1_and_2.py and bf16_optimizer.py, 0.19.8."""

PARAMETER_ALIGNMENT = 16
"""Bytes; `zero_optimization.parameter_alignment` of stage_1_and_2.py, 0.19.8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A stretch of one parameter in what a rank holds."""

    name: str
    """Parameter."""
    start: int
    """First element of the parameter's row-major order."""
    stop: int
    """One past the last."""
    offset: int
    """Element of the rank's flat tensor where the stretch starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroup:
    """The flat buffer of an optimizer group under stages 1 and 2."""

    names: tuple[str, ...]
    """Parameters, in the order of the buffer."""
    numels: tuple[int, ...]
    """Elements of each."""
    paddings: tuple[int, ...]
    """Elements of padding after each; all 0 unless `parameter_alignment` is on."""
    ranks: int
    """Ranks the buffer is cut over."""

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.numels) == len(self.paddings) or self.ranks < 1:
            raise ValueError(f"not a flat group: {self!r}")

    @property
    def offsets(self) -> tuple[int, ...]:
        """Element of the buffer where each parameter starts."""
        steps = (numel + padding for numel, padding in zip(self.numels, self.paddings, strict=True))
        return tuple(accumulate(steps, initial=0))[: len(self.names)]

    @property
    def used(self) -> int:
        """Elements up to the end of the last parameter."""
        return sum(self.numels) + sum(self.paddings)

    @property
    def partition(self) -> int:
        """Elements each rank holds, padding counted."""
        unit = START_ALIGNMENT * self.ranks
        return -(-self.used // unit) * START_ALIGNMENT

    def padding(self, rank: int) -> int:
        """Elements of padding at the end of the share of `rank`; it can be the whole share."""
        return self.partition - min(max(self.used - rank * self.partition, 0), self.partition)

    def held(self, rank: int) -> Iterator[Held]:
        """What `rank` holds, in increasing offset; parameters without an element there are left out."""
        first, last = rank * self.partition, (rank + 1) * self.partition
        for name, numel, offset in zip(self.names, self.numels, self.offsets, strict=True):
            start, stop = max(offset, first), min(offset + numel, last)
            if start < stop:
                yield Held(name=name, start=start - offset, stop=stop - offset, offset=start - first)


def flat_group(sizes: Sequence[tuple[str, int]], *, ranks: int, paddings: Sequence[int] | None = None) -> FlatGroup:
    """The buffer of parameters given as (name, elements) in its own order; `paddings`: elements after each."""
    return FlatGroup(
        names=tuple(name for name, _ in sizes),
        numels=tuple(numel for _, numel in sizes),
        paddings=(0,) * len(sizes) if paddings is None else tuple(paddings),
        ranks=ranks,
    )


def alignment_paddings(numels: Sequence[int], *, itemsize: int) -> tuple[int, ...]:
    """Padding after each parameter under `parameter_alignment`: each starts at a multiple of 16 bytes.

    `itemsize`: bytes of an element of the model's own dtype. None follows the last parameter.

    >>> alignment_paddings([5, 8, 3], itemsize=2)
    (3, 0, 0)
    """
    unit = PARAMETER_ALIGNMENT // gcd(PARAMETER_ALIGNMENT, itemsize)
    return (*(-numel % unit for numel in numels[:-1]), *(0 for _ in numels[-1:]))


def round_robin(names: Sequence[str], *, ranks: int) -> tuple[str, ...]:
    """Order of the buffer under `round_robin_gradients`: dealt to the ranks like cards, then hand after hand.

    >>> round_robin("abcde", ranks=2)
    ('a', 'c', 'e', 'b', 'd')
    """
    return tuple(name for rank in range(ranks) for name in names[rank::ranks])


def chunk(numel: int, *, ranks: int) -> int:
    """Elements of a stage-3 chunk, padding counted."""
    return -(-numel // ranks)


def chunk_range(numel: int, *, ranks: int, rank: int) -> tuple[int, int]:
    """Elements `start:stop` of a parameter that lie in the chunk of `rank`; empty past its end."""
    length = chunk(numel, ranks=ranks)
    return min(rank * length, numel), min((rank + 1) * length, numel)


def chunked(sizes: Sequence[tuple[str, int]], *, ranks: int, rank: int) -> Iterator[Held]:
    """What `rank` holds of a stage-3 sub-group given as (name, elements) in its own order.

    A chunk that is all padding is left out, but takes its place.
    """
    offset = 0
    for name, numel in sizes:
        start, stop = chunk_range(numel, ranks=ranks, rank=rank)
        if start < stop:
            yield Held(name=name, start=start, stop=stop, offset=offset)
        offset += chunk(numel, ranks=ranks)


def sub_groups(sizes: Sequence[tuple[str, int]], *, ranks: int, limit: int) -> tuple[tuple[str, ...], ...]:
    """Stage-3 sub-groups of an optimizer group: closed as soon as a rank's chunks reach `limit` elements.

    >>> sub_groups([("a", 4), ("b", 4), ("c", 4)], ranks=2, limit=4)
    (('a', 'b'), ('c',))
    """
    if limit >= sum(chunk(numel, ranks=ranks) for _, numel in sizes):
        return (tuple(name for name, _ in sizes),) if sizes else ()
    groups: list[tuple[str, ...]] = []
    open_names: list[str] = []
    held = 0
    for name, numel in sizes:
        open_names.append(name)
        held += chunk(numel, ranks=ranks)
        if held >= limit:
            groups.append(tuple(open_names))
            open_names, held = [], 0
    return (*groups, tuple(open_names)) if open_names else tuple(groups)
