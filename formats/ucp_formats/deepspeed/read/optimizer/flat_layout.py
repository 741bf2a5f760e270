"""How parameters lie in the one-dimensional tensors of ranks: three layouts, each a pattern per parameter.

- `SharedBuffer`: ZeRO-1/2, BF16_Optimizer and FP16_Optimizer; an equal share of one buffer with all parameters.
- `Chunks`: ZeRO-3; a chunk of each parameter.
- `WholeParameters`: what Muon keeps under ZeRO-1/2 (`_muon_momentum_buffer`, stage_1_and_2.py 0.19.8): every parameter
  that the rank's share touches, whole, one after another; ranks that share a parameter hold copies.

Padding is never named by a layout, so its bytes are never looked at.

>>> buffer = SharedBuffer(names=("a", "b"), starts=(0, 5), stops=(5, 7), share=4, ranks=2, known_from="param_shapes")
>>> buffer.starts_on(1), [str(pair.whole) for pair in buffer.axes()["a"].pattern.regions((5,), 2, 1)]
({'a': 0, 'b': 1}, ['[4:5]'])
>>> buffer.lengths(1), Chunks((("a", 5),), 2).lengths(1)
(range(3, 5), range(3, 4))
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import add
from typing import Protocol

from ucp.contract.registry import pattern
from ucp.core.layout import AxisLayout
from ucp_formats.deepspeed.partition import chunk, share
from ucp_formats.deepspeed.read.optimizer.saved import Span

__all__ = ["Chunks", "FlatLayout", "SharedBuffer", "WholeParameters", "chunk_axis", "shared_buffers"]


class FlatLayout(Protocol):
    """Where the elements of parameters lie in the flat tensor of each rank."""

    @property
    def ranks(self) -> int:
        """Ranks that hold a tensor each."""

    def lengths(self, rank: int) -> range:
        """Elements that the flat tensor of `rank` can have."""

    def axes(self) -> Mapping[str, AxisLayout]:
        """How the row-major order of each parameter with elements lies over the ranks."""

    def starts_on(self, rank: int) -> Mapping[str, int]:
        """Parameters that `rank` has elements of, to the element of its tensor where these begin; in that order."""


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
    known_from: str
    """Where that is known from."""

    def axes(self, name: str = "partition") -> Mapping[str, AxisLayout]:
        """A pattern of that name for each parameter."""
        return {
            param: AxisLayout("dp", self.ranks, pattern(name, start=start, share=self.share), self.known_from)
            for param, start in zip(self.names, self.starts, strict=True)
        }

    def starts_on(self, rank: int) -> Mapping[str, int]:
        """As the partition says."""
        return {name: span.start for name, span in self.spans(rank).items()}

    def spans(self, rank: int) -> dict[str, Span]:
        """`param_slice_mappings` of the share of `rank`, but for parameters without elements there."""
        first, last = rank * self.share, (rank + 1) * self.share
        return {
            self.names[at]: Span(
                max(start := self.starts[at], first) - first, min(self.stops[at], last) - max(start, first)
            )
            for at in self.touched(rank)
        }

    def touched(self, rank: int) -> range:
        """Positions of the parameters that have an element on `rank`."""
        low = bisect_right(self.stops, rank * self.share)
        return range(low, max(low, bisect_left(self.starts, (rank + 1) * self.share)))

    def lengths(self, rank: int) -> range:
        """Padding at the end of the share may be cut off, or not."""
        total = self.stops[-1] if self.stops else 0
        return range(min(max(total - rank * self.share, 0), self.share), self.share + 1)


@dataclass(frozen=True, slots=True)
class Chunks:
    """A chunk of ceil(numel / ranks) elements of each parameter."""

    sizes: tuple[tuple[str, int], ...]
    """Name and elements of each parameter, in order."""
    ranks: int
    """Ranks."""

    def axes(self) -> Mapping[str, AxisLayout]:
        """The same for all."""
        return dict.fromkeys((name for name, numel in self.sizes if numel), chunk_axis(self.ranks))

    def starts_on(self, rank: int) -> Mapping[str, int]:
        """One chunk after another, padding counted; without those that are all padding."""
        lengths = [chunk(numel, ranks=self.ranks) for _, numel in self.sizes]
        starts = accumulate(lengths, initial=0)
        every = zip(self.sizes, lengths, starts, strict=False)
        return {name: start for (name, numel), length, start in every if rank * length < numel}

    def lengths(self, rank: int) -> range:
        """All ranks hold as many, padding counted."""
        held = sum(chunk(own, ranks=self.ranks) for _, own in self.sizes)
        return range(held, held + 1)


def chunk_axis(ranks: int) -> AxisLayout:
    """How ZeRO-3 cuts every parameter."""
    return AxisLayout("dp", ranks, pattern("chunk", dim=0), "ZeRO-3")


@dataclass(frozen=True, slots=True)
class WholeParameters:
    """Every parameter that a rank's share of a buffer touches, whole."""

    buffer: SharedBuffer
    """The buffer."""

    @property
    def ranks(self) -> int:
        """Ranks."""
        return self.buffer.ranks

    def axes(self) -> Mapping[str, AxisLayout]:
        """Those of the buffer, for parameters that are whole on each rank which has some of them in its share."""
        return self.buffer.axes("touched")

    def starts_on(self, rank: int) -> Mapping[str, int]:
        """One after another."""
        touched = self.buffer.touched(rank)
        starts = accumulate(map(self.numel, touched), initial=0)
        return {self.buffer.names[at]: start for at, start in zip(touched, starts, strict=False)}

    def lengths(self, rank: int) -> range:
        """There is no padding."""
        held = sum(map(self.numel, self.buffer.touched(rank)))
        return range(held, held + 1)

    def numel(self, at: int) -> int:
        """Elements of the parameter at that position."""
        return self.buffer.stops[at] - self.buffer.starts[at]


def shared_buffers(
    numels: Mapping[str, int], *, ranks: int, paddings: Sequence[int] | None, first: int, known_from: str
) -> tuple[SharedBuffer, ...]:
    """Layouts that a buffer of these parameters can have, the usual one first.

    Shares are a multiple of 2 elements (`nccl_start_alignment_factor`); versions that round otherwise have shares as
    long as what rank 0 holds, `first` elements. `paddings`: elements after each parameter.
    """
    lengths = map(add, numels.values(), paddings or repeat(0))
    *starts, used = accumulate(lengths, initial=0)
    live = [(name, start, start + numel) for (name, numel), start in zip(numels.items(), starts, strict=True) if numel]
    return tuple(
        SharedBuffer(
            names=tuple(name for name, _, _ in live),
            starts=tuple(start for _, start, _ in live),
            stops=tuple(stop for _, _, stop in live),
            share=length,
            ranks=ranks,
            known_from=known_from,
        )
        for length in dict.fromkeys((share(used, ranks=ranks), first))
        if length * ranks >= used
    )
