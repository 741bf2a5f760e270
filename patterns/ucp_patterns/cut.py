"""Cut: a dim is cut into parts of recorded widths, block by block.

What `Shard` computes is recorded here: attention heads that do not divide, query heads and key/value heads of other
numbers, splits along a grain. A part holds its cut of every block one after another; a width may be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ucp.core.layout import Overlap
from ucp.core.region import Box, RegionPair

__all__ = ["Cut"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim cut by recorded widths.

    >>> [str(pair.whole) for pair in Cut(dim=0, widths=((3, 1), (1, 1))).regions((6, 2), 2, 1)]
    ['[3:4, 0:2]', '[5:6, 0:2]']
    """

    dim: int
    """Dim that is cut."""
    widths: tuple[tuple[int, ...], ...]
    """Elements of each block, in its order, on each part."""
    overlap: Overlap = Overlap.EXCLUSIVE
    """Parts share nothing."""

    def __post_init__(self) -> None:
        if self.dim < 0 or any(width < 0 for block in self.widths for width in block):
            raise ValueError(f"expected a dim and widths that are not negative; got {self.dim}, {self.widths}")

    @property
    def name(self) -> str:
        """Name as printed."""
        return f"cut(dim={self.dim}, widths={[list(block) for block in self.widths]})"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """This part's cut of every block, one after another; one empty box where that is nothing.

        `global_shape`: elements.

        Raises ValueError when the tensor lacks the dim, or the widths are not those of it and of so many parts.
        """
        if self.dim >= len(global_shape):
            raise ValueError(f"a tensor of shape {global_shape} has no dim {self.dim} to cut")
        length = global_shape[self.dim]
        if sum(map(sum, self.widths)) != length or any(len(block) != parts for block in self.widths):
            raise ValueError(f"widths {self.widths} do not cut the {length} elements of dim {self.dim} in {parts}")
        pairs = []
        begin = local = 0
        for block in self.widths:
            if block[index]:
                pairs.append(self._pair(global_shape, begin + sum(block[:index]), local, block[index]))
            begin += sum(block)
            local += block[index]
        return tuple(pairs) or (self._pair(global_shape, 0, 0, 0),)

    def whole_shape(self, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shapes with their lengths of the dim added up.

        Raises ValueError when other dims differ, or the lengths are not those of the widths.
        """
        others = {(*shape[: self.dim], *shape[self.dim + 1 :]) for shape in local_shapes}
        if len(others) != 1 or any(self.dim >= len(shape) for shape in local_shapes):
            shown = [list(shape) for shape in local_shapes]
            raise ValueError(f"{self.name}: expected parts that differ in dim {self.dim} only; got shapes {shown}")
        lengths = [shape[self.dim] for shape in local_shapes]
        wanted = [sum(own) for own in zip(*self.widths, strict=True)]
        if lengths != wanted:
            raise ValueError(f"{self.name}: expected parts with {wanted} elements of dim {self.dim}; got {lengths}")
        first = local_shapes[0]
        return (*first[: self.dim], sum(lengths), *first[self.dim + 1 :])

    def _pair(self, shape: tuple[int, ...], whole: int, local: int, length: int) -> RegionPair:
        sizes = (*shape[: self.dim], length, *shape[self.dim + 1 :])
        offsets = [tuple(at if dim == self.dim else 0 for dim in range(len(shape))) for at in (whole, local)]
        return RegionPair(Box(offsets[0], sizes), Box(offsets[1], sizes))
