"""How parameters lie in the one-dimensional tensors of ranks: three layouts, each a pattern per parameter.

- `SharedBuffer`: ZeRO-1/2, BF16_Optimizer and FP16_Optimizer; an equal share of one buffer with all parameters.
- `Chunks`: ZeRO-3; a chunk of each parameter.
- `WholeParameters`: what Muon keeps under ZeRO-1/2 (`_muon_momentum_buffer`, stage_1_and_2.py 0.19.8): every parameter
  that the rank's share touches, whole, one after another; ranks that share a parameter hold copies.

Padding is never named by a layout, so its bytes are never looked at.

>>> buffer = SharedBuffer(names=("a", "b"), starts=(0, 5), stops=(5, 7), share=4, ranks=2, known_from="param_shapes")
>>> buffer.starts_on(1), [str(pair.whole) for pair in buffer.axes()["a"].pattern.regions((5,), 2, 1)]
({'a': 0, 'b': 1}, ['[4:5]'])
>>> buffer.accepts(1, 3), buffer.accepts(1, 4), buffer.accepts(1, 2)
(True, True, False)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol, cast

from ucp.contract.registry import pattern
from ucp.core.layout import AxisLayout, Pattern
from ucp_formats.deepspeed.partition import chunk, flat_group

__all__ = [
    "Chunks",
    "FlatLayout",
    "Held",
    "SharedBuffer",
    "WholeParameters",
    "chunk_axis",
    "held_by_rank",
    "shared_buffers",
]


class FlatLayout(Protocol):
    """Where the elements of parameters lie in the flat tensor of each rank."""

    @property
    def ranks(self) -> int:
        """Ranks that hold a tensor each."""

    def accepts(self, rank: int, numel: int) -> bool:
        """Whether the flat tensor of `rank` can have so many elements."""

    def axes(self) -> Mapping[str, AxisLayout]:
        """How the row-major order of each parameter with elements lies over the ranks."""

    def starts_on(self, rank: int) -> Mapping[str, int]:
        """Parameters that `rank` has elements of, to the element of its tensor where these begin; in that order."""


class _InBuffer(Pattern, Protocol):
    """A pattern of a buffer's shares."""

    def offset(self, index: int) -> int:
        """Element of the share of part `index` where its part of the parameter begins."""


class Held(NamedTuple):
    """What a rank has of a parameter, in its row-major order."""

    start: int
    """First element."""
    numel: int
    """Elements."""
    offset: int
    """Element of the rank's tensor where they begin."""


def held_by_rank(layout: FlatLayout, ranks: Iterable[int], numels: Mapping[str, int]) -> dict[int, dict[str, Held]]:
    """What each of `ranks` has of every parameter; `numels`: elements of each."""
    axes = layout.axes()
    found: dict[int, dict[str, Held]] = {}
    for rank in ranks:
        found[rank] = {}
        for name, offset in layout.starts_on(rank).items():
            (pair,) = axes[name].pattern.regions((numels[name],), layout.ranks, rank)
            found[rank][name] = Held(pair.whole.offsets[0], pair.whole.sizes[0], offset)
    return found


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

    def axes(self) -> Mapping[str, AxisLayout]:
        """Partitions."""
        return self._axes("partition")

    def touching_axes(self) -> Mapping[str, AxisLayout]:
        """The same of parameters that are whole on each rank which has some of them in its share."""
        return self._axes("touched")

    def _axes(self, name: str) -> Mapping[str, AxisLayout]:
        return {
            param: AxisLayout("dp", self.ranks, pattern(name, start=start, share=self.share), self.known_from)
            for param, start in zip(self.names, self.starts, strict=True)
        }

    def starts_on(self, rank: int) -> Mapping[str, int]:
        """As the partition says."""
        cuts = {at: pattern("partition", start=self.starts[at], share=self.share) for at in self.touched(rank)}
        # the contract of this pattern: see `ucp_patterns.partition`
        return {self.names[at]: cast("_InBuffer", cut).offset(rank) for at, cut in cuts.items()}

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

    def accepts(self, rank: int, numel: int) -> bool:
        """All ranks hold as many, padding counted."""
        return numel == sum(chunk(own, ranks=self.ranks) for _, own in self.sizes)


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
        """Those of the buffer, for whole parameters."""
        return self.buffer.touching_axes()

    def starts_on(self, rank: int) -> Mapping[str, int]:
        """One after another."""
        touched = self.buffer.touched(rank)
        starts = accumulate(map(self.numel, touched), initial=0)
        return {self.buffer.names[at]: start for at, start in zip(touched, starts, strict=False)}

    def accepts(self, rank: int, numel: int) -> bool:
        """There is no padding."""
        return numel == sum(map(self.numel, self.buffer.touched(rank)))

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
            known_from=known_from,
        )
        for share in dict.fromkeys((group.partition, first))
        if share * ranks >= group.used
    )
