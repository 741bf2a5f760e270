"""Shard: a dim is cut into parts.

One block is Shard-V (dim 0 of a stored [out, in] weight) or Shard-H (dim 1). Several blocks are Shard-NC: the dim is
a concatenation (gate and up; q, k and v of unequal sizes), each block is cut on its own, and a part holds its cut of
every block one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucp.layout import Overlap
from ucp.region import Box, RegionPair

__all__ = ["Shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """A dim cut into nearly equal parts, the first ones longer by one where it does not divide.

    >>> [str(pair.whole) for pair in Shard(dim=0, blocks=(4, 2)).regions((6, 3), 2, 1)]
    ['[2:4, 0:3]', '[5:6, 0:3]']
    """

    dim: int
    """Dim that is cut."""
    blocks: tuple[int, ...] = ()
    """Elements of each block of that dim; empty for one block that is all of it."""
    overlap: Overlap = Overlap.EXCLUSIVE
    """Parts share nothing."""

    def __post_init__(self) -> None:
        if self.dim < 0 or any(block < 0 for block in self.blocks):
            raise ValueError(f"expected a dim and blocks that are not negative; got {self.dim}, {self.blocks}")

    @property
    def name(self) -> str:
        """Name as printed."""
        blocks = f", blocks={list(self.blocks)}" if self.blocks else ""
        return f"shard(dim={self.dim}{blocks})"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """This part's cut of every block, one after another; one empty box where that is nothing.

        `global_shape`: elements.

        Raises ValueError when the tensor lacks the dim, or the blocks do not add up to it.
        """
        if self.dim >= len(global_shape):
            raise ValueError(f"a tensor of shape {global_shape} has no dim {self.dim} to cut")
        length = global_shape[self.dim]
        blocks = self.blocks or (length,)
        if sum(blocks) != length:
            raise ValueError(f"blocks {blocks} do not add up to the {length} elements of dim {self.dim}")
        pairs = []
        begin = local = 0
        for block in blocks:
            low, high = _cut(block, parts, index)
            if high > low:
                pairs.append(self._pair(global_shape, begin + low, local, high - low))
            begin += block
            local += high - low
        return tuple(pairs) or (self._pair(global_shape, 0, 0, 0),)

    def _pair(self, shape: tuple[int, ...], whole: int, local: int, length: int) -> RegionPair:
        zero = (0,) * len(shape)
        sizes = (*shape[: self.dim], length, *shape[self.dim + 1 :])
        return RegionPair(Box(_at(zero, self.dim, whole), sizes), Box(_at(zero, self.dim, local), sizes))


def _cut(length: int, parts: int, index: int) -> tuple[int, int]:
    base, rest = divmod(length, parts)
    start = index * base + min(index, rest)
    return start, start + base + (index < rest)


def _at(offsets: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*offsets[:dim], value, *offsets[dim + 1 :])
