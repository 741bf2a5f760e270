"""Pieces: every part lists the boxes it holds, as a checkpoint recorded them; or indexes of the first dim.

For layouts that no other pattern describes: heads in an unusual order, blocks that some parts share, experts that a
placement puts on ranks. A box that several parts hold has the same bits on all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count, pairwise

from ucp.core.layout import Overlap, Pattern, join_shapes
from ucp.core.region import RegionPair
from ucp_patterns.shard import DimRange, check_dim, regions_of


@dataclass(frozen=True, slots=True)
class Pieces(Pattern):
    """Boxes by part.

    >>> from ucp.core.region import Box
    >>> first, last = Box((0,), (2,)), Box((2,), (2,))
    >>> shared = RegionPair(last, last)
    >>> pieces = Pieces(held=((RegionPair(first, first), shared), (RegionPair(last, first, copy=1),)))
    >>> [len(pieces.regions((4,), 2, index)) for index in (0, 1)]
    [2, 1]
    """

    held: tuple[tuple[RegionPair, ...], ...] = field(repr=False)
    """Boxes of each part, in increasing local offset; `copy` numbers a box that several parts hold."""
    overlap: Overlap = Overlap.EQUAL
    """Parts that hold the same box hold the same bits."""

    def __post_init__(self) -> None:
        """Raise ValueError for a pair of boxes of different sizes: a manifest may contain anything."""
        for pair in (pair for pairs in self.held for pair in pairs):
            if pair.dims is None and pair.global_box.sizes != pair.local.sizes:
                raise ValueError(
                    f"expected the same sizes in the global tensor and in the part; got {pair.global_box}, {pair.local}"
                )

    @property
    def name(self) -> str:
        """Name as printed."""
        return f"pieces({'+'.join(str(len(pairs)) for pairs in self.held)})"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """What part `index` holds. `global_shape`: elements. Raises ValueError for another number of parts."""
        if parts != len(self.held):
            raise ValueError(f"pieces of {len(self.held)} parts do not say what {parts} parts hold")
        return self.held[index]

    def whole_shape(self, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The smallest shape that contains all boxes. Raises ValueError if the parts have other shapes."""
        shapes = [_find_extent([pair.local.stops for pair in pairs]) for pairs in self.held]
        if len(shapes) != len(local_shapes) or any(
            a and a != tuple(b) for a, b in zip(shapes, local_shapes, strict=True)
        ):
            raise ValueError(f"{self.name}: expected parts of {shapes}; got {[list(shape) for shape in local_shapes]}")
        return _find_extent([pair.global_box.stops for pairs in self.held for pair in pairs])


def _find_extent(stops: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*stops, strict=True)))


@dataclass(frozen=True)
class Indexes(Pattern):
    """Indexes of the first dim by part, such as experts that a placement puts on ranks.

    A part may hold any number of them. An index that is listed several times, by one part or by several, has the same
    bits everywhere.

    >>> indexes = Indexes(by_part=((0, 1), (2, 0)))
    >>> [(str(pair.global_box), str(pair.local), pair.copy) for pair in indexes.regions((3, 5), 2, 1)]
    [('[2:3, 0:5]', '[0:1, 0:5]', 0), ('[0:1, 0:5]', '[1:2, 0:5]', 1)]
    """

    by_part: tuple[tuple[int, ...], ...]
    """Indexes that each part holds, in its order."""
    overlap: Overlap = Overlap.EQUAL
    """Parts that hold the same index hold the same bits."""

    def __post_init__(self) -> None:
        if any(index < 0 for index in chain(*self.by_part)):
            raise ValueError(f"expected indexes of 0 or more; got {self.by_part}")

    @property
    def name(self) -> str:
        """Name as printed."""
        return f"indexes({'+'.join(str(len(indexes)) for indexes in self.by_part)})"

    @cached_property
    def _copies(self) -> tuple[tuple[int, ...], ...]:
        """For each entry, how many entries before it are the same index."""
        counters: defaultdict[int, Iterator[int]] = defaultdict(count)
        return tuple(tuple(next(counters[index]) for index in indexes) for indexes in self.by_part)

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """What part `index` holds; one empty box if it holds nothing. `global_shape`: elements.

        Raises ValueError for another number of parts, and if the dim lacks an index.
        """
        if parts != len(self.by_part) or max(chain(*self.by_part), default=-1) >= check_dim(global_shape, 0):
            raise ValueError(
                f"{self.name} of {len(self.by_part)} parts do not fit {list(global_shape)} on {parts} parts"
            )
        return regions_of(global_shape, 0, _join(list(zip(self.by_part[index], self._copies[index], strict=True))))

    def whole_shape(self, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Global shape, up to the highest index. Raises ValueError if the parts have other shapes."""
        return join_shapes(self, tuple(map(tuple, local_shapes)), 1 + max(chain(*self.by_part), default=-1))


def _join(entries: Sequence[tuple[int, int]]) -> Iterator[DimRange]:
    """Entries (index, number of the copy) as ranges, as long as possible."""
    ends = [at for at, (a, b) in enumerate(pairwise(entries), 1) if b != (a[0] + 1, a[1])]
    for start, stop in pairwise([0, *ends, len(entries)] if entries else []):
        yield entries[start][0], entries[stop - 1][0] + 1, entries[start][1]
