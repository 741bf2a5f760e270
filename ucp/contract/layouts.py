"""Layouts that several formats share: flat buffers, whole tensors on some ranks, and the placements of a DTensor.

ZeRO-1/2, FSDP1 and the buffers of live optimizers flatten parameters. Each of these classes gives a pattern per
parameter, and where the parameter's shard begins in the flat tensor of a rank (padding belongs to no parameter):

- `FlatBuffer`: equal shares of one buffer of all parameters;
- `Chunks`: a chunk of each parameter, one after another (ZeRO-3);
- `WholeParameters`: every parameter that a rank's share of a buffer overlaps, in full; ranks that share it hold copies.

>>> buffer = FlatBuffer.pack({"a": 5, "b": 2}, ranks=2, share=4, known_from="param_shapes")
>>> buffer.spans(1), [str(pair.global_box) for pair in buffer.axes()["a"].pattern.regions((5,), 2, 1)]
({'a': Span(start=0, numel=1), 'b': Span(start=1, numel=2)}, ['[4:5]'])
>>> buffer.lengths(1), Chunks({"a": 5}, 2).lengths(1)
(range(3, 5), range(3, 4))
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple, Protocol

from ucp.contract.plugins import pattern
from ucp.core.layout import AxisLayout, Pattern


class Span(NamedTuple):
    """Elements of a flat tensor."""

    start: int
    """The first."""
    numel: int
    """Number of elements."""


class FlatLayout(Protocol):
    """Positions of parameters in the flat tensor of each rank."""

    @property
    def ranks(self) -> int:
        """Ranks that hold a tensor each."""

    def lengths(self, rank: int) -> range:
        """Possible lengths of the flat tensor of `rank`, in elements."""

    def axes(self) -> Mapping[str, AxisLayout]:
        """Layout of the row-major order of each parameter that is not empty."""

    def spans(self, rank: int) -> Mapping[str, Span]:
        """Range of each parameter in the flat tensor of `rank`, in order; parameters not on this rank are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBuffer:
    """Equal shares of one buffer."""

    names: tuple[str, ...]
    """Parameters that are not empty, in the order of the buffer."""
    starts: tuple[int, ...]
    """First element of each in the buffer."""
    stops: tuple[int, ...]
    """One past the last element of each."""
    share: int
    """Elements per rank, with padding."""
    ranks: int
    """Ranks."""
    axis: str = "dp"
    """Mesh axis of the ranks."""
    known_from: str
    """Source of this knowledge."""

    @classmethod
    def pack(
        cls,
        numels: Mapping[str, int],
        *,
        ranks: int,
        share: int,
        known_from: str,
        axis: str = "dp",
        starts: Sequence[int] | None = None,
    ) -> FlatBuffer:
        """The buffer of parameters with these numbers of elements; `starts`: their offsets, if not end to end."""
        starts = [*accumulate(numels.values(), initial=0)][:-1] if starts is None else starts
        live = [
            (name, start, start + numel) for (name, numel), start in zip(numels.items(), starts, strict=True) if numel
        ]
        names, firsts, stops = zip(*live, strict=True) if live else ((), (), ())
        return cls(names=names, starts=firsts, stops=stops, share=share, ranks=ranks, axis=axis, known_from=known_from)

    def axes(self, name: str = "partition") -> Mapping[str, AxisLayout]:
        """A pattern of this name for each parameter."""
        return {
            param: AxisLayout(self.axis, self.ranks, pattern(name, start=start, share=self.share), self.known_from)
            for param, start in zip(self.names, self.starts, strict=True)
        }

    def spans(self, rank: int) -> Mapping[str, Span]:
        """Ranges of the parameters that the share overlaps."""
        first, last = rank * self.share, (rank + 1) * self.share
        return {
            self.names[number]: Span(
                max(start := self.starts[number], first) - first, min(self.stops[number], last) - max(start, first)
            )
            for number in self.overlapping(rank)
        }

    def overlapping(self, rank: int) -> range:
        """Indexes of the parameters that have elements on `rank`."""
        low = bisect_right(self.stops, rank * self.share)
        return range(low, max(low, bisect_left(self.starts, (rank + 1) * self.share)))

    def lengths(self, rank: int) -> range:
        """With or without the padding at the end of the share."""
        total = self.stops[-1] if self.stops else 0
        return range(min(max(total - rank * self.share, 0), self.share), self.share + 1)


@dataclass(frozen=True, slots=True)
class Chunks:
    """A chunk of ceil(numel / ranks) elements of each parameter."""

    numels: Mapping[str, int]
    """Elements of each parameter, in order."""
    ranks: int
    """Ranks."""

    def axes(self) -> Mapping[str, AxisLayout]:
        """The layout of a chunk, the same for all parameters."""
        return dict.fromkeys((name for name, numel in self.numels.items() if numel), chunk_axis(self.ranks))

    def spans(self, rank: int) -> Mapping[str, Span]:
        """Ranges of the chunks, which are stored one after another with padding; empty ones are left out."""
        lengths = [-(-numel // self.ranks) for numel in self.numels.values()]
        chunks = zip(self.numels.items(), lengths, accumulate(lengths, initial=0), strict=False)
        return {
            name: Span(start, min(length, numel - rank * length))
            for (name, numel), length, start in chunks
            if rank * length < numel
        }

    def lengths(self, rank: int) -> range:
        """The same on all ranks, with padding."""
        total = sum(-(-numel // self.ranks) for numel in self.numels.values())
        return range(total, total + 1)


def chunk_axis(ranks: int) -> AxisLayout:
    """Layout of every parameter under ZeRO-3."""
    return AxisLayout("dp", ranks, pattern("chunk", dim=0), "ZeRO-3")


@dataclass(frozen=True, slots=True)
class WholeParameters:
    """Every parameter that a rank's share of a buffer overlaps, in full (Muon under ZeRO-1/2, DeepSpeed 0.19.8)."""

    buffer: FlatBuffer
    """The buffer."""

    @property
    def ranks(self) -> int:
        """Ranks."""
        return self.buffer.ranks

    def axes(self) -> Mapping[str, AxisLayout]:
        """Layout of each parameter of the buffer, with the pattern `touched`."""
        return self.buffer.axes("touched")

    def spans(self, rank: int) -> Mapping[str, Span]:
        """One after another."""
        touched = self.buffer.overlapping(rank)
        numels = [self.buffer.stops[number] - self.buffer.starts[number] for number in touched]
        ranges = zip(touched, accumulate(numels, initial=0), numels, strict=False)
        return {self.buffer.names[number]: Span(start, numel) for number, start, numel in ranges}

    def lengths(self, rank: int) -> range:
        """There is no padding."""
        total = sum(self.buffer.stops[number] - self.buffer.starts[number] for number in self.buffer.overlapping(rank))
        return range(total, total + 1)


_UNSHARDED = {"Replicate": "replicate", "Partial": "partial"}


@dataclass(frozen=True, slots=True)
class DTensorPlacement:
    """How one axis of a DTensor's mesh shards a tensor (torch 2.13, `torch/distributed/tensor/placement_types.py`).

    `_StridedShard(dim, split_factor)` is `Shard(dim)` applied after the inner axes that shard the same dim: FSDP shards
    after tensor parallelism. If the degrees of these axes do not multiply to `split_factor`, the pattern is `strided`.
    """

    kind: str
    """Name of its class in torch: Shard, _StridedShard, Replicate, Partial (of a mean)."""
    dim: int = 0
    """Sharded dim."""
    factor: int = 0
    """`split_factor` of a _StridedShard."""

    def pattern(self, *, in_order: bool) -> Pattern:
        """The pattern. `in_order`: whether the axes that shard before a `_StridedShard` precede it in the layout."""
        if self.kind in _UNSHARDED:
            return pattern(_UNSHARDED[self.kind])
        if self.kind == "Shard" or in_order:
            return pattern("chunk", dim=self.dim)
        return pattern("strided", dim=self.dim, split_factor=self.factor)


def placements_to_axes(
    names: Sequence[str], sizes: Sequence[int], placements: Sequence[DTensorPlacement], known_from: str
) -> tuple[AxisLayout, ...]:
    """Layout of each axis of a mesh, outermost first. `sizes`: ranks along each.

    >>> fsdp_after_tp = [DTensorPlacement("_StridedShard", dim=0, factor=2), DTensorPlacement("Shard", dim=0)]
    >>> axes = placements_to_axes(["dp", "tp"], [4, 2], fsdp_after_tp, "an example")
    >>> [f"{axis.axis}: {axis.pattern.name}" for axis in axes]
    ['tp: chunk(dim=0)', 'dp: chunk(dim=0)']
    """
    inner_axes: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if placement.kind == "_StridedShard":
            cuts = [
                i
                for i in range(axis + 1, len(sizes))
                if placements[i].dim == placement.dim and "Shard" in placements[i].kind
            ]
            if prod(sizes[i] for i in cuts) == placement.factor:
                inner_axes[axis] = cuts
    order: list[int] = []
    for axis in range(len(sizes)):
        order += [earlier for earlier in (*inner_axes.get(axis, ()), axis) if earlier not in order]
    return tuple(
        AxisLayout(names[axis], sizes[axis], placements[axis].pattern(in_order=axis in inner_axes), known_from)
        for axis in order
    )


def holder_axes(axis: str, parts: int, known_from: str, holders: Collection[int] = ()) -> tuple[AxisLayout, ...]:
    """Layout along an axis whose ranks `holders` (empty: all ranks) have the full tensor; nothing for a single rank.

    >>> [axis.pattern.name for holders in ({1}, {0, 3}) for axis in holder_axes("pp", 4, "arguments", holders)]
    ['unique', 'replicate(holders=[0, 3])']
    """
    parts_with_it = tuple(sorted(set(holders)))
    return () if parts == 1 else (_axis(axis, parts, known_from, parts_with_it if len(parts_with_it) < parts else ()),)


@lru_cache(maxsize=1 << 12)
def _axis(axis: str, parts: int, known_from: str, holders: tuple[int, ...]) -> AxisLayout:
    if len(holders) == 1:
        return AxisLayout(axis, parts, pattern("unique", owner=holders[0]), known_from)
    return AxisLayout(axis, parts, pattern("replicate", holders=holders), known_from)
