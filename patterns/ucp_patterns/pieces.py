"""Pieces: every part lists the boxes it holds, as a checkpoint recorded them.

For layouts that no other pattern describes: heads in an unusual order, blocks that some parts share. A box that
several parts hold has the same bits on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ucp.core.layout import Overlap, Pattern
from ucp.core.region import RegionPair


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
