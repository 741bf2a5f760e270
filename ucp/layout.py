"""How a parameter is laid out over the axes of a mesh: patterns, their composition, their overlap rules.

A pattern says which boxes of a tensor part `index` of `parts` holds, and where they lie in its local tensor. Several
axes compose, outermost first. What a rank then holds of the whole is `place(...)`; a ZeRO or FSDP1 flat partition is
a flat range over that local tensor (`place(..., flat=(start, stop))`).

>>> from ucp.topology import Topology
>>> layout = Layout()
>>> [str(piece.box) for piece in place(layout, (3, 4), coords={}, flat=(2, 9))]
['[0:1, 2:4]', '[1:2, 0:4]', '[2:3, 0:1]']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from ucp.region import Box, RegionPair, compose, intersect, local_flat_pairs
from ucp.tensor import contiguous_strides

__all__ = ["AxisLayout", "Layout", "Overlap", "Pattern", "Placed", "local_shape", "place"]


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
        """Boxes of the whole that part `index` of `parts` holds, in increasing local offset."""


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
    pairs: tuple[RegionPair, ...] = (RegionPair(whole, whole),)
    shape = tuple(global_shape)
    replica = term = 0
    for axis in layout.axes:
        index = coords[axis.axis]
        inner = axis.pattern.regions(shape, axis.parts, index)
        if not inner:
            return ()
        pairs = compose(pairs, inner)
        shape = _part_shape(inner)
        replica = replica * axis.parts + index if axis.pattern.overlap is Overlap.EQUAL else replica
        term = term * axis.parts + index if axis.pattern.overlap is Overlap.MEAN else term
    return tuple(
        Placed(box=box, offset=offset, strides=strides, replica=replica, term=term)
        for box, offset, strides in _stored(pairs, shape, flat)
    )


def _stored(
    pairs: tuple[RegionPair, ...], shape: tuple[int, ...], flat: tuple[int, int] | None
) -> list[tuple[Box, int, tuple[int, ...]]]:
    """Global box, storage offset and strides for every region, cut to the flat range if there is one."""
    strides = contiguous_strides(shape)
    if flat is None:
        return [(pair.whole, pair.local.flat_start(shape) if shape else 0, strides) for pair in pairs]
    found = []
    for run, position in local_flat_pairs(shape, *flat):
        for pair in pairs:
            shared = intersect(run, pair.local)
            if shared is not None:
                offsets = tuple(
                    s - a + b for s, a, b in zip(shared.offsets, pair.local.offsets, pair.whole.offsets, strict=True)
                )
                inside = shared.flat_start(shape) - run.flat_start(shape)
                found.append((Box(offsets, shared.sizes), position + inside, strides))
    return found
