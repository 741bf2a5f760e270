"""How a parameter is laid out over the axes of a mesh: patterns, their composition, their overlap rules.

A pattern says which boxes of a tensor part `index` of `parts` holds, and where they lie in its local tensor. Several
axes compose, outermost first. What a rank then holds of the whole is `place(...)`; a ZeRO or FSDP1 flat partition is
a flat range over that local tensor (`place(..., flat=(start, stop))`).

>>> from ucp.core.topology import Topology
>>> layout = Layout()
>>> [str(piece.box) for piece in place(layout, (3, 4), coords={}, flat=(2, 9))]
['[0:1, 2:4]', '[1:2, 0:4]', '[2:3, 0:1]']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Protocol, runtime_checkable

from ucp.core.region import Box, RegionPair, compose, intersect, local_flat_pairs
from ucp.core.tensor import contiguous_strides

__all__ = [
    "AxisLayout",
    "Layout",
    "Overlap",
    "Pattern",
    "Placed",
    "common_shape",
    "local_shape",
    "place",
    "whole_shape",
]


class Overlap(StrEnum):
    """What it means when several parts hold the same element."""

    EXCLUSIVE = "exclusive"
    """They must not."""
    EQUAL = "equal"
    """All hold the same bits; one is taken, the others are compared."""
    MEAN = "mean"
    """Each holds its own value; the whole is their mean."""


@runtime_checkable
class Pattern(Protocol):
    """One way to lay a tensor out over one axis: a pure function and an overlap rule."""

    @property
    def name(self) -> str:
        """Name as printed, e.g. "shard(dim=0)"."""

    @property
    def overlap(self) -> Overlap:
        """What parts that hold the same element mean."""

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """Boxes of the whole that part `index` of `parts` holds, in increasing local offset.

        What several parts hold is numbered by `RegionPair.copy`: the boxes of any one copy tile what is shared.
        """

    def whole_shape(self, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of the whole whose parts have these shapes, in order. Raises ValueError when they have none."""


@dataclass(frozen=True, slots=True)
class AxisLayout:
    """A pattern along one axis of the mesh."""

    axis: str
    """Mesh axis, e.g. "tp"."""
    parts: int
    """Degree of that axis."""
    pattern: Pattern
    """How the tensor lies along it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Patterns over several axes, outermost first; none at all means one whole tensor."""

    axes: tuple[AxisLayout, ...] = ()
    """One entry per axis that matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One box of the whole, and where it starts in what a rank stores."""

    box: Box
    """Elements of the whole."""
    offset: int
    """Element of the rank's storage (local tensor, or flat range of it) where the box starts."""
    strides: tuple[int, ...]
    """Elements to step in that storage, per dim of the box."""
    replica: int
    """0 where this rank is the first to hold the box; above, it holds a copy of rule EQUAL."""
    term: int
    """Which summand of a mean this is (rule MEAN); 0 elsewhere."""


def local_shape(layout: Layout, global_shape: Sequence[int], coords: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the tensor that the rank at `coords` holds; all dims are 0 where it holds none."""
    shape = tuple(global_shape)
    for axis in layout.axes:
        pairs = axis.pattern.regions(shape, axis.parts, coords[axis.axis])
        if not pairs:
            return (0,) * len(shape)
        shape = _part_shape(pairs)
    return shape


def whole_shape(layout: Layout, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of the whole, from the shapes that all ranks hold.

    `local_shapes`: one per rank of the layout's axes, the first axis slowest; all dims 0 where a rank holds nothing.
    Raises ValueError when no whole has such parts.

    >>> whole_shape(Layout(), [(3, 4)])
    (3, 4)
    """
    shapes = list(local_shapes)
    if len(shapes) != prod(axis.parts for axis in layout.axes):
        axes = " x ".join(f"{axis.axis}={axis.parts}" for axis in layout.axes) or "no axis"
        raise ValueError(f"expected a shape for every rank of {axes}; got {len(shapes)}")
    for axis in reversed(layout.axes):
        groups = [shapes[at : at + axis.parts] for at in range(0, len(shapes), axis.parts)]
        shapes = [axis.pattern.whole_shape(group) for group in groups]
    return shapes[0]


def common_shape(local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The one shape that all of `local_shapes` are. Raises ValueError when they differ, or there is none."""
    if len(set(local_shapes)) != 1:
        raise ValueError(f"expected one shape on all parts; got {[list(shape) for shape in local_shapes]}")
    return tuple(local_shapes[0])


def _part_shape(pairs: tuple[RegionPair, ...]) -> tuple[int, ...]:
    return tuple(max(stops) for stops in zip(*(pair.local.stops for pair in pairs), strict=True))


def place(
    layout: Layout,
    global_shape: Sequence[int],
    *,
    coords: Mapping[str, int],
    flat: tuple[int, int] | None = None,
) -> tuple[Placed, ...]:
    """Boxes of the whole that the rank at `coords` stores.

    `flat`: element range of the row-major local tensor that this rank stores; None for all of it.
    """
    whole = Box.whole(global_shape)
    held = [_Held(RegionPair(whole, whole), 0, 0)]
    shape = tuple(global_shape)
    for axis in layout.axes:
        inner = axis.pattern.regions(shape, axis.parts, coords[axis.axis])
        if not inner:
            return ()
        held = [deeper for own in held for near in inner for deeper in own.cut(axis, near)]
        shape = _part_shape(inner)
    return tuple(
        Placed(box=box, offset=offset, strides=strides, replica=own.replica, term=own.term)
        for own, box, offset, strides in _stored(held, shape, flat)
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """A region of a rank's local tensor, while axes are composed."""

    pair: RegionPair
    replica: int
    term: int

    def cut(self, axis: AxisLayout, near: RegionPair) -> list[_Held]:
        """What one region of the next axis leaves of it: one piece or none."""
        overlap = axis.pattern.overlap
        replica = self.replica * axis.parts + near.copy if overlap is Overlap.EQUAL else self.replica
        term = self.term * axis.parts + near.copy if overlap is Overlap.MEAN else self.term
        return [_Held(pair, replica, term) for pair in compose((self.pair,), (near,))]


def _stored(
    held: list[_Held], shape: tuple[int, ...], flat: tuple[int, int] | None
) -> list[tuple[_Held, Box, int, tuple[int, ...]]]:
    """Every region with its box of the whole, storage offset and strides, cut to the flat range if there is one."""
    strides = contiguous_strides(shape)
    if flat is None:
        return [(own, own.pair.whole, own.pair.local.flat_start(shape) if shape else 0, strides) for own in held]
    found = []
    for run, position in local_flat_pairs(shape, *flat):
        for own in held:
            near, far = own.pair.local, own.pair.whole
            shared = intersect(run, near)
            if shared is not None:
                offsets = tuple(s - a + b for s, a, b in zip(shared.offsets, near.offsets, far.offsets, strict=True))
                inside = shared.flat_start(shape) - run.flat_start(shape)
                found.append((own, Box(offsets, shared.sizes), position + inside, strides))
    return found
