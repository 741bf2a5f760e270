"""How a parameter is laid out over the axes of a mesh: patterns, their composition, their overlap rules.

A pattern gives the boxes of a tensor that part `index` of `parts` holds, and where they lie in its local tensor. Axes
compose, outermost first. ZeRO, the distributed optimizer and FSDP1 then cut the row-major order of the local tensor,
with patterns over one dim (`Layout.flat`). `place` gives what a rank holds of the global tensor.

>>> from ucp_patterns.chunk import Chunk
>>> layout = Layout(flat=(AxisLayout("dp", 2, Chunk(0)),))
>>> [str(piece.box) for piece in place(layout, (3, 4), coords={"dp": 1})]
['[1:2, 2:4]', '[2:3, 0:4]']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import product
from math import prod
from typing import Protocol, runtime_checkable

from ucp.core.region import Box, RegionPair, intersect, locate_flat_range
from ucp.core.tensor import contiguous_strides


class Overlap(StrEnum):
    """What it means when several parts hold the same element."""

    EXCLUSIVE = "exclusive"
    """It is an error: no two parts may hold the same element."""
    EQUAL = "equal"
    """All hold the same bits; one is taken, the others are compared."""
    MEAN = "mean"
    """Each holds its own value; the global tensor is their mean."""
    PATCHED = "patched"
    """Term 0 is a base; every further term changes some bytes of what the terms before it give, in order."""


@runtime_checkable
class Pattern(Protocol):
    """One way to lay a tensor out over one axis: a pure function and an overlap rule."""

    @property
    def name(self) -> str:
        """Name as printed, e.g. "shard(dim=0)"."""

    @property
    def overlap(self) -> Overlap:
        """What it means when several parts hold the same element."""

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """Boxes of the global tensor that part `index` of `parts` holds, in increasing local offset.

        Where several parts hold the same elements, `RegionPair.copy` numbers the copies; the boxes of every copy tile
        these elements.
        """

    def whole_shape(self, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of the global tensor whose parts have these shapes, in order. Raises ValueError if there is none."""
        return join_shapes(self, tuple(map(tuple, local_shapes)))  # type: ignore[arg-type]  # patterns are frozen


@lru_cache(maxsize=4096)  # layers are alike
def join_shapes(pattern: Pattern, shapes: tuple[tuple[int, ...], ...], length: int | None = None) -> tuple[int, ...]:
    """The global shape that `pattern.regions` cuts into `shapes`: the shape of a part, or that with one dim joined.

    `length`: length of the joined dim, if it is not the sum over the parts. Raises ValueError if no shape fits.
    """
    first = next((shape for shape in shapes if prod(shape)), shapes[0])
    sums = map(sum, zip(*(shape for shape in shapes if len(shape) == len(first)), strict=True))
    lengths = [total if length is None else length for total in sums]
    for candidate in (first, *((*first[:dim], joined, *first[dim + 1 :]) for dim, joined in enumerate(lengths))):
        try:
            parts = [pattern.regions(candidate, len(shapes), index) for index in range(len(shapes))]
        except ValueError:
            continue
        if all(
            _shape_of_regions(pairs) == shape if pairs else 0 in shape or not shape
            for pairs, shape in zip(parts, shapes, strict=True)
        ):
            return candidate
    raise ValueError(f"{pattern.name}: expected the parts of one tensor; got shapes {list(map(list, shapes))}")


@dataclass(frozen=True, slots=True)
class AxisLayout:
    """A pattern along one axis of the mesh."""

    axis: str
    """Mesh axis, e.g. "tp"."""
    parts: int
    """Degree of that axis."""
    pattern: Pattern
    """How the tensor is laid out along it."""
    known_from: str = field(default="", compare=False)
    """Source of this knowledge, e.g. "param_shapes of FILE", "family llama", "ZeRO-3" (a fixed rule of DeepSpeed)."""

    def holders(self, global_shape: tuple[int, ...]) -> list[int]:
        """Parts that hold a piece of a tensor of this shape, even an empty piece."""
        return [part for part in range(self.parts) if self.pattern.regions(global_shape, self.parts, part)]

    def dim(self, global_shape: tuple[int, ...]) -> int | None:
        """The only dim of a tensor that this axis shards; None if it shards none, or several.

        >>> from ucp_patterns.chunk import Chunk
        >>> AxisLayout("dp", 2, Chunk(1)).dim((3, 4))
        1
        """
        parts = (self.pattern.regions(global_shape, self.parts, index) for index in range(self.parts))
        pieces = (pair.global_box.sizes for pairs in parts for pair in pairs)
        dims = {dim for sizes in pieces for dim, length in enumerate(global_shape) if sizes[dim] != length}
        return dims.pop() if len(dims) == 1 else None


@dataclass(frozen=True, slots=True)
class Layout:
    """Patterns over several axes, outermost first; without axes, every rank holds the global tensor."""

    axes: tuple[AxisLayout, ...] = ()
    """Axes over the dims of the tensor."""
    flat: tuple[AxisLayout, ...] = ()
    """Axes that then cut the row-major order of the local tensor: patterns over one dim."""

    @property
    def all_axes(self) -> tuple[AxisLayout, ...]:
        """All axes, outermost first."""
        return self.axes + self.flat

    @property
    def descriptions(self) -> tuple[tuple[str, str], ...]:
        """For people: degree and pattern of each axis of degree above 1, and the source of that knowledge."""
        named = [(axis, "") for axis in self.axes] + [(axis, "flat ") for axis in self.flat]
        return tuple(
            (f"{axis.axis}={axis.parts}: {order}{axis.pattern.name}", axis.known_from)
            for axis, order in named
            if axis.parts > 1
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """`descriptions`, each as one text."""
        return tuple(
            what + (f", known from {known_from}" if known_from else "") for what, known_from in self.descriptions
        )

    @property
    def patterns(self) -> dict[str, str]:
        """Each axis of degree above 1, and the name of its pattern."""
        return {what.partition("=")[0]: what.partition(": ")[2] for what, _ in self.descriptions}

    @property
    def overlap(self) -> Overlap:
        """MEAN if the values of some ranks are to be averaged, else EXCLUSIVE."""
        means = any(axis.pattern.overlap is Overlap.MEAN for axis in self.axes)
        return Overlap.MEAN if means else Overlap.EXCLUSIVE

    def dim(self, axis: str, global_shape: Sequence[int]) -> int | None:
        """Dim that the ranks along `axis` shard, as `AxisLayout.dim`; None without such an axis."""
        shape = tuple(global_shape)
        for axis_layout in self.axes:
            if axis_layout.axis == axis:
                return axis_layout.dim(shape)
            shape = _shape_of_regions(
                axis_layout.pattern.regions(shape, axis_layout.parts, axis_layout.holders(shape)[0])
            )
        return None

    def ranks(self) -> Iterator[dict[str, int]]:
        """Coordinates of every rank of its axes, the first axis slowest.

        >>> list(Layout().ranks())
        [{}]
        """
        for indexes in product(*(range(axis.parts) for axis in self.all_axes)):
            yield dict(zip((axis.axis for axis in self.all_axes), indexes, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBox:
    """A box of the global tensor, and where a rank stores it."""

    box: Box
    """Elements of the global tensor."""
    local: Box
    """The same elements in the rank's local tensor, before a flat cut."""
    offset: int
    """Element of the rank's storage (its local tensor in row-major order, or a range of that) where the box starts."""
    strides: tuple[int, ...]
    """Elements to step in that storage, per dim of the box."""
    replica: int
    """0 on the first rank that holds the box; above, a copy (rule EQUAL)."""
    term: int
    """Number of the summand of a mean (rule MEAN); else 0."""


def compute_local_shape(layout: Layout, global_shape: Sequence[int], coords: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the local tensor of the rank at `coords`; all dims are 0 if it holds none."""
    return _compose_axes(layout.axes, tuple(global_shape), coords)[1]


def infer_global_shape(layout: Layout, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of the global tensor, from the local shapes of all ranks.

    `local_shapes`: one per rank of the layout's axes, the first axis slowest; all dims 0 if a rank holds nothing.
    Raises ValueError if no global tensor has such parts.

    >>> infer_global_shape(Layout(), [(3, 4)])
    (3, 4)
    """
    shapes = list(local_shapes)
    if len(shapes) != prod(axis.parts for axis in layout.axes):
        axes = " x ".join(f"{axis.axis}={axis.parts}" for axis in layout.axes) or "no axis"
        raise ValueError(f"expected a shape for every rank of {axes}; got {len(shapes)}")
    for axis in reversed(layout.axes):
        groups = [shapes[start : start + axis.parts] for start in range(0, len(shapes), axis.parts)]
        shapes = [axis.pattern.whole_shape(group) for group in groups]
    return shapes[0]


def _shape_of_regions(pairs: tuple[RegionPair, ...]) -> tuple[int, ...]:
    return tuple(max(stops) for stops in zip(*(pair.local.stops for pair in pairs), strict=True))


def place(layout: Layout, global_shape: Sequence[int], *, coords: Mapping[str, int]) -> tuple[PlacedBox, ...]:
    """Boxes of the global tensor that the rank at `coords` stores; in increasing offset if there is a flat cut."""
    shard = locate_shard(layout, global_shape, coords=coords)
    shape, strides = shard.local_shape, shard.strides
    if shard.flat is None:
        return tuple(
            PlacedBox(
                box=region.pair.global_box,
                local=region.pair.local,
                offset=region.pair.local.flat_start(shape) if shape else 0,
                strides=strides,
                replica=region.replica,
                term=region.term,
            )
            for region in shard.regions
        )
    placed = []
    for run in shard.flat:
        start, length = run.pair.global_box.offsets[0], run.pair.global_box.sizes[0]
        for box, position in locate_flat_range(shape, start, start + length):
            for region in shard.regions:
                near, far = region.pair.local, region.pair.global_box
                shared = box if near.sizes == shape else intersect(box, near)
                if shared is None:
                    continue
                offsets = tuple(map(int.__add__, map(int.__sub__, shared.offsets, near.offsets), far.offsets))
                inside = shared.flat_start(shape) - box.flat_start(shape)
                placed.append(
                    PlacedBox(
                        box=Box(offsets, shared.sizes),
                        local=shared,
                        offset=run.pair.local.offsets[0] + position + inside,
                        strides=strides,
                        replica=region.replica * shard.flat_copies + run.replica,
                        term=region.term * shard.flat_terms + run.term,
                    )
                )
    return tuple(placed)


def locate_shard(layout: Layout, global_shape: Sequence[int], *, coords: Mapping[str, int]) -> RankShard:
    """What the rank at `coords` stores, before flat ranges are cut into boxes as `place` does."""
    shape = tuple(global_shape)
    regions, local = _compose_axes(layout.axes, shape, coords)
    if not regions:
        return RankShard(regions=(), local_shape=(0,) * len(shape), flat=None)
    return RankShard(
        regions=regions,
        local_shape=local,
        flat=_compose_axes(layout.flat, (prod(local),), coords)[0] if layout.flat else None,
        flat_copies=_degree(layout.flat, Overlap.EQUAL),
        flat_terms=_degree(layout.flat, Overlap.MEAN),
    )


def _degree(axes: Iterable[AxisLayout], overlap: Overlap) -> int:
    return prod(axis.parts for axis in axes if axis.pattern.overlap is overlap)


def _compose_axes(
    axes: Iterable[AxisLayout], shape: tuple[int, ...], coords: Mapping[str, int]
) -> tuple[tuple[ShardRegion, ...], tuple[int, ...]]:
    """Regions of the local tensor at `coords`, and its shape; no regions if an axis gives the rank nothing."""
    full = Box.full(shape)
    regions = [ShardRegion(RegionPair(full, full), 0, 0)]
    for number, axis in enumerate(axes):
        inner_pairs = axis.pattern.regions(shape, axis.parts, coords[axis.axis])
        if not inner_pairs:
            return (), (0,) * len(shape)
        overlap = axis.pattern.overlap
        deeper = []
        for outer in regions:
            for inner in inner_pairs:
                pair = inner if number == 0 and inner.global_box.numel else inner.after(outer.pair)
                if pair is not None:
                    replica = outer.replica * axis.parts + inner.copy if overlap is Overlap.EQUAL else outer.replica
                    term = outer.term * axis.parts + inner.copy if overlap is Overlap.MEAN else outer.term
                    deeper.append(ShardRegion(pair, replica, term))
        regions, shape = deeper, _shape_of_regions(inner_pairs)
    return tuple(regions), shape


@dataclass(frozen=True, slots=True)
class ShardRegion:
    """A region of a rank's local tensor."""

    pair: RegionPair
    """Its boxes in the global and in the local tensor."""
    replica: int
    """0 on the first rank that holds it."""
    term: int
    """Number of the summand of a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShard:
    """What one rank stores of a tensor."""

    regions: tuple[ShardRegion, ...]
    """Regions that make up its local tensor."""
    local_shape: tuple[int, ...]
    """Shape of that tensor, elements."""
    flat: tuple[ShardRegion, ...] | None
    """Ranges of its row-major order that are stored, one after another; None if the tensor itself is stored."""
    flat_copies: int = 1
    """Copies that the flat axes make."""
    flat_terms: int = 1
    """Summands of a mean that the flat axes make."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements to step in the storage, per dim."""
        return contiguous_strides(self.local_shape)

    @property
    def numel(self) -> int:
        """Elements stored."""
        if not self.regions:
            return 0
        return prod(self.local_shape) if self.flat is None else sum(run.pair.local.numel for run in self.flat)
