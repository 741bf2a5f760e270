"""How a rank's one-dimensional tensor is made of stretches of parameters: three layouts, all of integers.

- `SharedBuffer`: ZeRO-1/2, BF16_Optimizer and FP16_Optimizer; an equal share of one buffer with all parameters.
- `Chunks`: ZeRO-3; a chunk of each parameter.
- `WholeParameters`: what Muon keeps under ZeRO-1/2 (`_muon_momentum_buffer`, stage_1_and_2.py 0.19.8): every parameter
  that the rank's share touches, whole, one after another; ranks that share a parameter hold copies.

Padding is never named by a layout, so its bytes are never looked at.

>>> buffer = SharedBuffer(names=("a", "b"), starts=(0, 5), stops=(5, 7), share=4, ranks=2)
>>> [(held.name, held.start, held.stop, held.offset) for held in buffer.held(1)]
[('a', 4, 5, 0), ('b', 0, 2, 1)]
>>> buffer.accepts(1, 3), buffer.accepts(1, 4), buffer.accepts(1, 2)
(True, True, False)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ucp_formats.deepspeed.partition import Held, chunk, chunked, flat_group

__all__ = ["Chunks", "FlatLayout", "SharedBuffer", "WholeParameters", "shared_buffers"]


class FlatLayout(Protocol):
    """Where the elements of parameters lie in the flat tensor of each rank."""

    @property
    def ranks(self) -> int:
        """Ranks that hold a tensor each."""

    def held(self, rank: int) -> Sequence[Held]:
        """Stretches that `rank` holds, in increasing offset; empty ones are left out."""

    def accepts(self, rank: int, numel: int) -> bool:
        """Whether the flat tensor of `rank` can have so many elements."""

    def replica(self, name: str, rank: int) -> int:
        """0 where `rank` is the first to hold those elements of the parameter, else which copy it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer:
    """Equal shares of one buffer."""

    names: tuple[str, ...]
    """Parameters with elements, in the order of the buffer."""
    starts: tuple[int, ...]
    """Element of the buffer where each starts."""
    stops: tuple[int, ...]
    """One past the last element of each."""
    share: int
    """Elements that each rank holds, padding counted."""
    ranks: int
    """Ranks."""

    def held(self, rank: int) -> Sequence[Held]:
        """Stretches of the rank's share."""
        first = rank * self.share
        found = []
        for at in self.touched(rank):
            origin = self.starts[at]
            start, stop = max(origin, first), min(self.stops[at], first + self.share)
            found.append(Held(name=self.names[at], start=start - origin, stop=stop - origin, offset=start - first))
        return found

    def touched(self, rank: int) -> range:
        """Positions of the parameters that have an element on `rank`."""
        first, last = rank * self.share, (rank + 1) * self.share
        low = bisect_right(self.stops, first)
        return range(low, max(low, bisect_left(self.starts, last)))

    def accepts(self, rank: int, numel: int) -> bool:
        """Padding at the end of the share may be cut off, or not."""
        return self.used(rank) <= numel <= self.share

    def used(self, rank: int) -> int:
        """Elements of the share up to the end of the last parameter on it."""
        total = self.stops[-1] if self.stops else 0
        return min(max(total - rank * self.share, 0), self.share)

    def replica(self, name: str, rank: int) -> int:
        """0: every element is on one rank."""
        return 0


@dataclass(frozen=True, slots=True)
class Chunks:
    """A chunk of ceil(numel / ranks) elements of each parameter."""

    sizes: tuple[tuple[str, int], ...]
    """Name and elements of each parameter, in order."""
    ranks: int
    """Ranks."""

    def held(self, rank: int) -> Sequence[Held]:
        """Chunks of the rank."""
        return tuple(chunked(self.sizes, ranks=self.ranks, rank=rank))

    def accepts(self, rank: int, numel: int) -> bool:
        """All ranks hold as many, padding counted."""
        return numel == sum(chunk(own, ranks=self.ranks) for _, own in self.sizes)

    def replica(self, name: str, rank: int) -> int:
        """0: every element is on one rank."""
        return 0


@dataclass(frozen=True, slots=True)
class WholeParameters:
    """Every parameter that a rank's share of a buffer touches, whole."""

    buffer: SharedBuffer
    """The buffer."""

    @property
    def ranks(self) -> int:
        """Ranks."""
        return self.buffer.ranks

    def held(self, rank: int) -> Sequence[Held]:
        """The whole of each parameter."""
        found = []
        offset = 0
        for at in self.buffer.touched(rank):
            numel = self.numel(at)
            found.append(Held(name=self.buffer.names[at], start=0, stop=numel, offset=offset))
            offset += numel
        return found

    def accepts(self, rank: int, numel: int) -> bool:
        """There is no padding."""
        return numel == sum(map(self.numel, self.buffer.touched(rank)))

    def numel(self, at: int) -> int:
        """Elements of the parameter at that position."""
        return self.buffer.stops[at] - self.buffer.starts[at]

    def replica(self, name: str, rank: int) -> int:
        """How many ranks before it touch the parameter."""
        start = self.buffer.starts[self.buffer.names.index(name)]
        return rank - start // self.buffer.share


def shared_buffers(
    numels: Mapping[str, int], *, ranks: int, paddings: Sequence[int] | None, first: int
) -> tuple[SharedBuffer, ...]:
    """Layouts that a buffer of these parameters can have, the usual one first.

    Shares are a multiple of 2 elements (`nccl_start_alignment_factor`); versions that round otherwise have shares as
    long as what rank 0 holds, `first` elements. `paddings`: elements after each parameter.
    """
    group = flat_group(list(numels.items()), ranks=ranks, paddings=paddings)
    live = [at for at, numel in enumerate(group.numels) if numel]
    starts = group.offsets
    return tuple(
        SharedBuffer(
            names=tuple(group.names[at] for at in live),
            starts=tuple(starts[at] for at in live),
            stops=tuple(starts[at] + group.numels[at] for at in live),
            share=share,
            ranks=ranks,
        )
        for share in dict.fromkeys((group.partition, first))
        if share * ranks >= group.used
    )
