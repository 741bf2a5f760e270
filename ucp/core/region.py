"""Boxes: half-open, axis-parallel pieces of a tensor, in elements. Integers only.

1. `intersect` two boxes of the same whole.
2. `flat_boxes` cuts a range of the row-major order of a tensor into at most 2 * ndim - 1 boxes.
3. `compose` follows a piece of a piece back to the whole.
4. `uncovered` proves that boxes tile the whole, or names the holes and overlaps.

>>> flat_boxes((3, 4), 2, 9)
(Box(offsets=(0, 2), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(1, 4)), Box(offsets=(2, 0), sizes=(1, 1)))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from operator import add

__all__ = ["Box", "Gap", "RegionPair", "compose", "flat_boxes", "intersect", "local_flat_pairs", "uncovered"]


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
    def whole(shape: Sequence[int]) -> Box:
        """The box that is all of `shape`."""
        return _whole(tuple(shape))

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
        """Whether the elements are consecutive in the row-major order of `shape`.

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
def _whole(shape: tuple[int, ...]) -> Box:
    """One box for all tensors of a shape, of which a model has few."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class RegionPair:
    """The same elements seen in the whole and in a local tensor; the sizes agree."""

    whole: Box
    """Where they are in the global tensor."""
    local: Box
    """Where they are in the local tensor."""
    copy: int = 0
    """Which copy of these elements it is, where several parts hold them; 0 is the first."""

    def __post_init__(self) -> None:
        if self.whole.sizes != self.local.sizes:
            raise ValueError(f"sizes differ: {self.whole} in the whole, {self.local} in the local tensor")


@dataclass(frozen=True, slots=True)
class Gap:
    """What keeps boxes from tiling a whole."""

    box: Box
    """The elements concerned."""
    owners: tuple[int, ...]
    """Positions of the boxes that hold them: none for a hole, two or more for an overlap."""


def intersect(a: Box, b: Box) -> Box | None:
    """Common part of two boxes of the same whole, or None when they share no element.

    >>> intersect(Box((0, 0), (2, 4)), Box((1, 1), (4, 2)))
    Box(offsets=(1, 1), sizes=(1, 2))
    """
    offsets = tuple(map(max, a.offsets, b.offsets))
    stops = tuple(map(min, a.stops, b.stops))
    if any(stop <= start for start, stop in zip(offsets, stops, strict=True)):
        return None
    return Box(offsets, tuple(stop - start for start, stop in zip(offsets, stops, strict=True)))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Boxes that hold positions `start` to `stop` of the row-major order of `shape`, in that order.

    `start`, `stop`: elements, half-open, within the tensor. At most 2 * ndim - 1 boxes; none when empty.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"range {start}:{stop} does not lie in a tensor of shape {tuple(shape)}")
    if start == stop:
        return ()
    if not shape:
        return (Box((), ()),)
    return _kept_boxes(tuple(shape), start, stop)


@lru_cache(maxsize=1 << 12)
def _kept_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """`flat_boxes`, the same objects again for the same range: a model has many parameters of one shape."""
    return tuple(_flat_boxes(shape, start, stop))


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """`flat_boxes` for at least one dim and one element."""
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    inner = prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return [_under(first, box) for box in _flat_boxes(shape[1:], head, tail)]
    boxes: list[Box] = []
    if head:
        boxes += [_under(first, box) for box in _flat_boxes(shape[1:], head, inner)]
        first += 1
    if last > first:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if tail:
        boxes += [_under(last, box) for box in _flat_boxes(shape[1:], 0, tail)]
    return boxes


def _under(index: int, box: Box) -> Box:
    return Box((index, *box.offsets), (1, *box.sizes))


def local_flat_pairs(local_shape: Sequence[int], start: int, stop: int) -> tuple[tuple[Box, int], ...]:
    """Boxes of a flat range of a local tensor, each with its element offset from `start`.

    >>> local_flat_pairs((2, 3), 1, 6)
    ((Box(offsets=(0, 1), sizes=(1, 2)), 0), (Box(offsets=(1, 0), sizes=(1, 3)), 2))
    """
    pairs = []
    position = 0
    for box in flat_boxes(local_shape, start, stop):
        pairs.append((box, position))
        position += box.numel
    return tuple(pairs)


def compose(outer: Iterable[RegionPair], inner: Iterable[RegionPair]) -> tuple[RegionPair, ...]:
    """Where the pieces of a piece lie in the whole.

    `outer` maps a part to the whole; `inner` maps a part of that part to the part. The result maps the innermost
    part to the whole. Composition is associative.
    """
    inner = tuple(inner)
    pairs = []
    for far in outer:
        for near in inner:
            shared = intersect(far.local, near.whole)
            if shared is not None:
                pairs.append(
                    RegionPair(
                        _moved(shared, far.local.offsets, far.whole.offsets),
                        _moved(shared, near.whole.offsets, near.local.offsets),
                    )
                )
    return tuple(pairs)


def _moved(box: Box, origin: tuple[int, ...], target: tuple[int, ...]) -> Box:
    offsets = tuple(o - a + b for o, a, b in zip(box.offsets, origin, target, strict=True))
    return Box(offsets, box.sizes)


def uncovered(shape: Sequence[int], boxes: Sequence[Box], *, most: int = 8) -> tuple[Gap, ...]:
    """Holes and overlaps that keep `boxes` from tiling `shape`; empty when they tile it exactly.

    `most`: stop after so many gaps. Boxes past the shape count as an overlap with nothing: ValueError.

    >>> uncovered((4,), [Box((0,), (2,)), Box((3,), (1,))])
    (Gap(box=Box(offsets=(2,), sizes=(1,)), owners=()),)
    """
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.sizes) != len(shape) or any(map(int.__gt__, box.stops, whole.stops)):
            raise ValueError(f"{box} does not lie in a tensor of shape {tuple(shape)}")
    live = [(position, box) for position, box in enumerate(boxes) if box.numel]
    if not whole.numel or _is_one_run(whole, live):
        return ()
    gaps: list[Gap] = []
    _sweep(whole.stops, live, gaps=gaps, most=most)
    return tuple(gaps)


def _is_one_run(whole: Box, live: list[tuple[int, Box]]) -> bool:
    """Whether the boxes, as they come, are the row-major order cut into stretches: the common case, cheap to see."""
    position = 0
    for _, box in live:
        if not box.is_flat_in(whole.sizes) or box.flat_start(whole.sizes) != position:
            return False
        position += box.numel
    return position == whole.numel


def _sweep(
    stops: tuple[int, ...],
    live: list[tuple[int, Box]],
    done: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    *,
    gaps: list[Gap],
    most: int,
) -> None:
    """Cut the next dim at every edge, and look at each slab on its own; `done`: offsets and sizes so far."""
    dim = len(done[0])
    if dim == len(stops):
        if len(live) != 1:
            gaps.append(Gap(Box(*done), tuple(position for position, _ in live)))
        return
    if len(live) == 1 and _fills(live[0][1], stops, dim):
        return
    ordered = sorted(live, key=lambda item: item[1].offsets[dim])
    edges = sorted({0, stops[dim], *(e for _, b in live for e in (b.offsets[dim], b.stops[dim]))})
    active: list[tuple[int, Box]] = []
    upcoming = 0
    for low, high in pairwise(edges):
        active = [item for item in active if item[1].stops[dim] > low]
        while upcoming < len(ordered) and ordered[upcoming][1].offsets[dim] <= low:
            active.append(ordered[upcoming])
            upcoming += 1
        if len(gaps) >= most:
            return
        _sweep(stops, active, ((*done[0], low), (*done[1], high - low)), gaps=gaps, most=most)


def _fills(box: Box, stops: tuple[int, ...], dim: int) -> bool:
    return not any(box.offsets[dim:]) and box.stops[dim:] == stops[dim:]
