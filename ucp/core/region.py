"""Boxes: half-open, axis-parallel pieces of a tensor, in elements.

1. `intersect`: the elements that two boxes of a tensor share.
2. `cut_flat_range`: a range of the row-major order of a tensor, as at most 2 * ndim - 1 boxes.
3. `RegionPair.after`: where a piece of a piece lies in the global tensor, also transposed or strided.
4. `find_gaps`: the holes and overlaps that keep boxes from tiling a tensor.

>>> cut_flat_range((3, 4), 2, 9)
(Box(offsets=(0, 2), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(1, 4)), Box(offsets=(2, 0), sizes=(1, 1)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from operator import add, sub
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box of a tensor."""

    offsets: tuple[int, ...]
    """First element, per dim."""
    sizes: tuple[int, ...]
    """Elements, per dim; 0 makes the box empty."""

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"offsets {self.offsets} and sizes {self.sizes} differ in dims")
        if min((0, *self.offsets, *self.sizes)) < 0:
            raise ValueError(f"negative offset or size: {self.offsets}, {self.sizes}")

    @staticmethod
    def full(shape: Sequence[int]) -> Box:
        """The box of all elements of a tensor of this shape."""
        return _full_box(tuple(shape))

    whole = full
    """Name of `full` before 26 November 2026, for scripts that use it."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last element, per dim."""
        return tuple(map(add, self.offsets, self.sizes))

    def flat_start(self, shape: Sequence[int]) -> int:
        """Row-major position in `shape` of the first element."""
        position = 0
        for offset, length in zip(self.offsets, shape, strict=True):
            position = position * length + offset
        return position

    def is_flat_in(self, shape: Sequence[int]) -> bool:
        """Whether the elements are consecutive in the row-major order of a tensor of this shape.

        >>> Box((1, 0), (2, 4)).is_flat_in((3, 4)), Box((0, 1), (2, 2)).is_flat_in((3, 4))
        (True, False)
        """
        if self.sizes[1:] == tuple(shape[1:]) or self.numel <= 1:
            return True
        lead = 0
        while self.sizes[lead] == 1:
            lead += 1
        return tuple(self.sizes[lead + 1 :]) == tuple(shape[lead + 1 :])

    def __str__(self) -> str:
        spans = ", ".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.sizes, strict=True))
        return f"[{spans}]"


@lru_cache(maxsize=4096)
def _full_box(shape: tuple[int, ...]) -> Box:
    """The same object for all tensors of a shape, as a model has few shapes."""
    return Box((0,) * len(shape), shape)


class RegionPair(NamedTuple):
    """The same elements as a box of a global tensor and as a box of a local tensor.

    >>> transposed = RegionPair.strided(Box((0, 0), (3, 2)), "w", (0, 0), (1, 0), (1, 1))  # w is [2, 3]
    >>> column = transposed.within(Box((0, 1), (2, 1)))
    >>> str(column.local), str(column.global_box)
    ('[1:2, 0:2]', '[0:2, 1:2]')
    """

    global_box: Box
    """Bounding box of the elements in the global tensor."""
    local: Box
    """Box of the elements in the local tensor."""
    copy: int = 0
    """Number of the copy, where several parts hold these elements; 0 for the first."""
    source: str = ""
    """Name of the global tensor, if there are several."""
    dims: tuple[int | None, ...] | None = None
    """Per dim of the local tensor, the matching dim of the global one (None for a dim of length 1 without one).

    None instead of a tuple: the same dims, in steps of one element."""
    steps: tuple[int, ...] = ()
    """Elements of the global tensor to step along each of `dims`."""

    @classmethod
    def strided(
        cls,
        local: Box,
        source: str,
        start: Sequence[int],
        dims: tuple[int | None, ...],
        steps: tuple[int, ...],
    ) -> RegionPair:
        """Elements of `source` from the coordinates `start` on, along `dims` in these `steps`."""
        extents = [1] * len(start)
        for dim, step, size in zip(dims, steps, local.sizes, strict=True):
            if dim is not None:
                extents[dim] = (size - 1) * step + 1 if size else 0
        global_box = Box(tuple(start), tuple(extents))
        if dims == tuple(range(len(start))) and set(steps) <= {1}:
            return cls(global_box, local, source=source)
        return cls(global_box, local, source=source, dims=dims, steps=steps)

    def within(self, box: Box) -> RegionPair | None:
        """The part of this pair inside `box` of the global tensor; None if that is empty."""
        shared = intersect(self.global_box, box)
        if shared is None:
            return None
        if self.dims is None:
            return self._replace(global_box=shared, local=_shift(shared, self.global_box.offsets, self.local.offsets))
        lows, highs = [0] * len(self.dims), list(self.local.sizes)
        start = list(self.global_box.offsets)
        for local_dim, (dim, step) in enumerate(zip(self.dims, self.steps, strict=True)):
            if dim is None:
                continue
            lows[local_dim] = -((start[dim] - shared.offsets[dim]) // step)
            highs[local_dim] = -((start[dim] - shared.stops[dim]) // step)
            if lows[local_dim] >= highs[local_dim]:
                return None
            start[dim] += lows[local_dim] * step
        offsets, sizes = tuple(map(add, self.local.offsets, lows)), tuple(map(sub, highs, lows))
        return self.strided(Box(offsets, sizes), self.source, start, self.dims, self.steps)

    def after(self, outer: RegionPair) -> RegionPair | None:
        """This pair composed with `outer`, whose local tensor is this pair's global one; None if they do not overlap.

        Composition is associative.
        """
        inner = self.within(outer.local)
        if inner is None:
            return None
        if inner.dims is None and outer.dims is None:
            global_box = _shift(inner.global_box, outer.local.offsets, outer.global_box.offsets)
            return RegionPair(global_box, inner.local, source=outer.source)
        start, outer_steps = list(outer.global_box.offsets), outer.dim_steps
        for position, first, (dim, step) in zip(
            inner.global_box.offsets, outer.local.offsets, outer_steps, strict=True
        ):
            if dim is not None:
                start[dim] += (position - first) * step
        dims: list[int | None] = []
        steps: list[int] = []
        for middle_dim, inner_step in inner.dim_steps:
            dim, step = (None, 1) if middle_dim is None else outer_steps[middle_dim]
            dims.append(dim)
            steps.append(step if middle_dim is None else inner_step * step)
        return self.strided(inner.local, outer.source, start, tuple(dims), tuple(steps))

    @property
    def dim_steps(self) -> list[tuple[int | None, int]]:
        """Per dim of the local tensor, the dim of the global one and the step along it."""
        if self.dims is None:
            return [(dim, 1) for dim in range(len(self.local.sizes))]
        return list(zip(self.dims, self.steps, strict=True))


@lru_cache(maxsize=4096)
def full_pairs(shape: tuple[int, ...]) -> tuple[RegionPair, ...]:
    """The pair of a local tensor that is the full global tensor. Cached: tensors of one shape share the object."""
    box = Box.full(shape)
    return (RegionPair(box, box),)


@dataclass(frozen=True, slots=True)
class Gap:
    """A hole or overlap that keeps boxes from tiling a tensor."""

    box: Box
    """The elements concerned."""
    owners: tuple[int, ...]
    """Positions of the boxes that hold them: none for a hole, two or more for an overlap."""


def intersect(a: Box, b: Box) -> Box | None:
    """The box that two boxes of a tensor share; None if they share no element.

    >>> intersect(Box((0, 0), (2, 4)), Box((1, 1), (4, 2)))
    Box(offsets=(1, 1), sizes=(1, 2))
    """
    offsets = tuple(map(max, a.offsets, b.offsets))
    stops = tuple(map(min, a.stops, b.stops))
    if any(stop <= start for start, stop in zip(offsets, stops, strict=True)):
        return None
    return Box(offsets, tuple(stop - start for start, stop in zip(offsets, stops, strict=True)))


def cut_flat_range(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Boxes that hold elements `start` to `stop` (exclusive) of the row-major order of `shape`, in that order.

    At most 2 * ndim - 1 boxes; none for an empty range. Raises ValueError for a range outside the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"range {start}:{stop} does not lie in a tensor of shape {tuple(shape)}")
    if start == stop:
        return ()
    return _cut_cached(tuple(shape), start, stop) if shape else (Box((), ()),)


@lru_cache(maxsize=1 << 12)
def _cut_cached(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The same objects for the same range: a model has many parameters of one shape."""
    return tuple(_cut_flat_range(shape, start, stop))


def _cut_flat_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]

    def cut_row(row: int, low: int, high: int) -> list[Box]:
        boxes = _cut_flat_range(shape[1:], low, high)
        return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]

    row_numel = prod(shape[1:])
    first, head = divmod(start, row_numel)
    last, tail = divmod(stop, row_numel)
    if first == last:
        return cut_row(first, head, tail)
    boxes: list[Box] = []
    if head:
        boxes += cut_row(first, head, row_numel)
        first += 1
    if last > first:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if tail:
        boxes += cut_row(last, 0, tail)
    return boxes


def locate_flat_range(local_shape: Sequence[int], start: int, stop: int) -> tuple[tuple[Box, int], ...]:
    """The boxes of `cut_flat_range`, each with its offset from `start`, in elements.

    >>> locate_flat_range((2, 3), 1, 6)
    ((Box(offsets=(0, 1), sizes=(1, 2)), 0), (Box(offsets=(1, 0), sizes=(1, 3)), 2))
    """
    boxes = cut_flat_range(local_shape, start, stop)
    return tuple(zip(boxes, accumulate((box.numel for box in boxes), initial=0), strict=False))


def _shift(box: Box, origin: tuple[int, ...], target: tuple[int, ...]) -> Box:
    offsets = tuple(o - a + b for o, a, b in zip(box.offsets, origin, target, strict=True))
    return Box(offsets, box.sizes)


def find_gaps(shape: Sequence[int], boxes: Sequence[Box], *, most: int = 8) -> tuple[Gap, ...]:
    """Holes and overlaps that keep `boxes` from tiling `shape`; empty if they tile it exactly.

    `most`: gaps after which to stop. Raises ValueError for a box outside the tensor.

    >>> find_gaps((4,), [Box((0,), (2,)), Box((3,), (1,))])
    (Gap(box=Box(offsets=(2,), sizes=(1,)), owners=()),)
    """
    full = Box.full(shape)
    for box in boxes:
        if len(box.sizes) != len(shape) or any(map(int.__gt__, box.stops, full.stops)):
            raise ValueError(f"{box} does not lie in a tensor of shape {tuple(shape)}")
    live = [(position, box) for position, box in enumerate(boxes) if box.numel]
    if not full.numel or _is_flat_cut(full, live):
        return ()
    gaps: list[Gap] = []
    _collect_gaps(full.stops, live, gaps=gaps, most=most)
    return tuple(gaps)


def _is_flat_cut(full: Box, live: list[tuple[int, Box]]) -> bool:
    """Whether the boxes are consecutive ranges of the row-major order: the most common case, and quick to check."""
    position = 0
    for _, box in live:
        if not box.is_flat_in(full.sizes) or box.flat_start(full.sizes) != position:
            return False
        position += box.numel
    return position == full.numel


def _collect_gaps(
    stops: tuple[int, ...],
    live: list[tuple[int, Box]],
    done: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    *,
    gaps: list[Gap],
    most: int,
) -> None:
    """Cut the next dim at every edge and check each slab on its own; `done`: offsets and sizes of the dims before."""
    dim = len(done[0])
    if dim == len(stops):
        if len(live) != 1:
            gaps.append(Gap(Box(*done), tuple(position for position, _ in live)))
        return
    if len(live) == 1 and not any(live[0][1].offsets[dim:]) and live[0][1].stops[dim:] == stops[dim:]:
        return
    ordered = sorted(live, key=lambda item: item[1].offsets[dim])
    edges = sorted({0, stops[dim], *(edge for _, box in live for edge in (box.offsets[dim], box.stops[dim]))})
    active: list[tuple[int, Box]] = []
    upcoming = 0
    for low, high in pairwise(edges):
        active = [item for item in active if item[1].stops[dim] > low]
        while upcoming < len(ordered) and ordered[upcoming][1].offsets[dim] <= low:
            active.append(ordered[upcoming])
            upcoming += 1
        if len(gaps) >= most:
            return
        _collect_gaps(stops, active, ((*done[0], low), (*done[1], high - low)), gaps=gaps, most=most)
