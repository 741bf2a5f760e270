"""Which ranks hold how much of a tensor, and which boxes of it, as small numbers for a page.

>>> from ucp.core.layout import AxisLayout
>>> from ucp_patterns.chunk import Chunk
>>> holders = HolderTable()
>>> holders.add(Layout(flat=(AxisLayout("dp", 2, Chunk(0)),)), (3, 4))
0
>>> holders.profiles[0]["runs"], holders.profiles[0]["boxes"][0]
([[0, 2, 6]], [[0, 0], [1, 4], [[0, 1]]])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from ucp.core.layout import AxisLayout, Layout, Overlap, locate_shard, place

UNKNOWN = -1
"""Number of the profile of a tensor whose layout is not recorded."""

_MOST_SHARDS = 3_000_000
"""Shards that are looked up for a page, at most: some twenty seconds."""
_MOST_PLACED = 20_000
"""Shards whose boxes are drawn, at most, in all layouts together."""
_MOST_DRAWN = 256
"""The same in one layout."""

Shape = tuple[int, ...]


class HolderTable:
    """Profiles of tensors: the ranks that hold a part, each with its number of elements. Equal ones are listed once."""

    def __init__(self) -> None:
        self.meshes: list[dict[str, Any]] = []
        """Axes with their degrees, outermost first, and the layout over them in words."""
        self.profiles: list[dict[str, Any]] = []
        """`mesh`; `runs` (first rank, count, elements of each); `boxes` (offsets, sizes, runs of ranks), if drawn."""
        self._numbers: dict[tuple[Layout, Shape], int] = {}
        self._mesh_numbers: dict[object, int] = {}
        self._cuts: dict[tuple[AxisLayout, Shape], list[tuple[int, Shape]]] = {}
        self._near: dict[tuple[str, int], int] = {}
        self._shards_left, self._placed_left = _MOST_SHARDS, _MOST_PLACED

    @property
    def is_cut_short(self) -> bool:
        """Whether there were more shards than are looked up."""
        return self._shards_left <= 0

    def add(self, layout: Layout, shape: Shape) -> int:
        """Number of the profile of a tensor; UNKNOWN if its layout has no axes, or if there are too many shards.

        UNKNOWN, too, if the layout does not fit the shape: the page is for checkpoints that are in doubt.
        """
        if (layout, shape) not in self._numbers:
            self._numbers[layout, shape] = UNKNOWN
            if layout.all_axes and not self.is_cut_short:
                try:
                    numels = self._count_elements(layout, shape)
                    drawing = self._draw(layout, shape, [*numels])
                except ValueError:
                    return UNKNOWN
                self._numbers[layout, shape] = len(self.profiles)
                self.profiles.append({"mesh": self._mesh(layout), "runs": _to_runs(numels), **drawing})
        return self._numbers[layout, shape]

    def _mesh(self, layout: Layout) -> int:
        axes = tuple((axis.axis, axis.parts) for axis in layout.all_axes)
        number = self._mesh_numbers.setdefault((axes, layout.lines), len(self.meshes))
        if number == len(self.meshes):
            self.meshes.append({"axes": axes, "lines": layout.lines})
        return number

    def _count_elements(self, layout: Layout, shape: Shape) -> dict[int, int]:
        """Rank to elements that it holds. Ranks are numbered over the axes of the layout, the first axis slowest."""
        shapes = {0: shape}
        for axis in layout.axes:
            shapes = self._cut_all(shapes, axis)
        shapes = {rank: (prod(local),) for rank, local in shapes.items()}
        for axis in layout.flat:
            shapes = self._cut_all(shapes, axis)
        return {rank: prod(local) for rank, local in sorted(shapes.items())}

    def _cut_all(self, shapes: dict[int, Shape], axis: AxisLayout) -> dict[int, Shape]:
        return {
            rank * axis.parts + part: local for rank, shape in shapes.items() for part, local in self._cut(axis, shape)
        }

    def _cut(self, axis: AxisLayout, shape: Shape) -> list[tuple[int, Shape]]:
        """Parts that hold any of a tensor of this shape, and their local shapes.

        The search begins at the last part that held the tensor before it, which lies next to it in a flat buffer, and
        ends when all elements are found.
        """
        cut = self._cuts.get((axis, shape))
        if cut is not None:
            return cut
        cut, covered, near = [], 0, self._near.get((axis.axis, axis.parts), 0)
        for part in (*range(near, axis.parts), *range(near)):
            self._shards_left -= 1
            shard = locate_shard(Layout((axis,)), shape, coords={axis.axis: part})
            if shard.numel:
                cut.append((part, shard.local_shape))
                covered += shard.numel
                if axis.pattern.overlap is Overlap.EXCLUSIVE and covered == prod(shape):
                    break
        if cut:
            self._near[axis.axis, axis.parts] = cut[-1][0]
        self._cuts[axis, shape] = cut
        return cut

    def _draw(self, layout: Layout, shape: Shape, ranks: list[int]) -> dict[str, Any]:
        """`boxes` of the ranks; `drawn`: how many axes of the layout they show, or of how many ranks they are."""
        shown, note = layout, ""
        if len(ranks) > _MOST_DRAWN:
            axes = layout.axes
            while prod(axis.parts for axis in axes) > _MOST_DRAWN:
                axes = axes[:-1]
            if axes:
                shown, note = Layout(axes), f"cut further over {' and '.join(_rest(layout, len(axes)))}"
                inner = prod(axis.parts for axis in layout.all_axes[len(axes) :])
                ranks = list(dict.fromkeys(rank // inner for rank in ranks))
            else:
                note = f"the first {_MOST_DRAWN} of {len(ranks):,} ranks"
                ranks = ranks[:_MOST_DRAWN]
        self._placed_left -= len(ranks)
        if self._placed_left < 0:
            return {}
        holders: dict[tuple[Shape, Shape], dict[int, int]] = {}
        for rank in ranks:
            for placed in place(shown, shape, coords=_coords(shown, rank)):
                holders.setdefault((placed.box.offsets, placed.box.sizes), {})[rank] = 0
        boxes = [[[*o], [*s], [run[:2] for run in _to_runs(who)]] for (o, s), who in holders.items() if prod(s)]
        depth = len(shown.all_axes)
        return {"boxes": boxes, "note": note, **({"depth": depth} if depth < len(layout.all_axes) else {})}


def _rest(layout: Layout, count: int) -> Iterator[str]:
    return (f"{axis.axis}={axis.parts}" for axis in layout.all_axes[count:])


def _coords(layout: Layout, rank: int) -> dict[str, int]:
    coords = {}
    for axis in reversed(layout.all_axes):
        rank, coords[axis.axis] = divmod(rank, axis.parts)
    return coords


def _to_runs(numels: dict[int, int]) -> list[list[int]]:
    """Consecutive ranks with equal numbers of elements as one run: first rank, count, elements. `numels` is sorted."""
    runs: list[list[int]] = []
    for rank, numel in numels.items():
        if runs and rank == runs[-1][0] + runs[-1][1] and numel == runs[-1][2]:
            runs[-1][1] += 1
        else:
            runs.append([rank, 1, numel])
    return runs


def make_side(
    title: str, tensors: Iterable[tuple[str, list[tuple[Layout, Shape] | None]]], *, without: str
) -> dict[str, Any]:
    """Who holds what on one side of a page. `tensors`: for each state, the layout and shape of each parameter.

    `without`: what the page says of a parameter without a layout.
    """
    table = HolderTable()
    distinct: list[list[tuple[Layout, Shape] | None]] = []
    states: dict[str, int] = {}
    for state, placed in tensors:
        if placed not in distinct:
            distinct.append(placed)
        states[state] = distinct.index(placed)
    columns = [[UNKNOWN if item is None else table.add(*item) for item in placed] for placed in distinct]
    return {
        "title": title,
        "without": without,
        "states": states,
        "columns": columns,
        "meshes": table.meshes,
        "profiles": table.profiles,
        "cut_short": table.is_cut_short,
    }
