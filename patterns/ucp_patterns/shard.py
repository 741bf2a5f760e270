"""Shard: a dim is cut into parts.

With one block it is the paper's Shard-V (dim 0 of a stored [out, in] weight) or Shard-H (dim 1); with several, its
Shard-NC: the dim is a concatenation (gate and up; q, k and v of unequal sizes), each block is cut separately, and a
part holds its range of every block, one after another. A block may be cut into fewer pieces than there are parts: then
`copies` adjacent parts hold the same piece (grouped attention with fewer key and value heads than tensor-parallel
ranks).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ucp.core.layout import Overlap, Pattern, join_shapes
from ucp.core.region import Box, RegionPair

DimRange = tuple[int, int, int]
"""First element and one past the last, of a dim of the global tensor, and the number of the copy."""

_MOST_BLOCKS = 8192
"""Gate and up of twice as many experts as any layer has; each block costs some 30 microseconds per rank."""


@dataclass(frozen=True, slots=True)
class Shard(Pattern):
    """A dim cut into nearly equal parts, the first ones longer by one where it does not divide.

    >>> [str(pair.global_box) for pair in Shard(dim=0, blocks=(4, 2)).regions((6, 3), 2, 1)]
    ['[2:4, 0:3]', '[5:6, 0:3]']
    >>> [str(pair.global_box) for pair in Shard(dim=0, blocks=(8, 2), copies=(1, 2)).regions((10,), 4, 1)]
    ['[2:4]', '[8:9]']
    """

    dim: int
    """Dim that is cut."""
    blocks: tuple[int, ...] = ()
    """Elements of each block of that dim; empty for one block, the whole dim."""
    copies: tuple[int, ...] = ()
    """Per block, number of adjacent parts that hold the same piece; empty for one each. Divides the number of parts."""
    repeat: int = 1
    """How often the sequence of blocks is repeated (once per expert, if experts share a tensor)."""

    def __post_init__(self) -> None:
        if self.dim < 0 or any(block < 0 for block in self.blocks):
            raise ValueError(f"expected a dim and blocks that are not negative; got {self.dim}, {self.blocks}")
        if len(self.blocks) * self.repeat > _MOST_BLOCKS:
            raise ValueError(
                f"expected at most {_MOST_BLOCKS:,} blocks, repeats counted; got {len(self.blocks):,} x {self.repeat:,}"
            )
        if self.repeat < 1 or (self.repeat > 1 and not self.blocks):
            raise ValueError(f"expected a repeat of 1 or more, and blocks if more; got {self.repeat} of {self.blocks}")
        if self.copies and (len(self.copies) != len(self.blocks) or any(copy < 1 for copy in self.copies)):
            raise ValueError(
                f"expected a number of copies, 1 or more, for each of the blocks {self.blocks}; got {self.copies}"
            )

    @property
    def name(self) -> str:
        """Name as printed."""
        blocks = f", blocks={list(self.blocks)}" if self.blocks else ""
        copies = f", copies={list(self.copies)}" if self.copies else ""
        repeat = f", repeat={self.repeat}" if self.repeat > 1 else ""
        return f"shard(dim={self.dim}{blocks}{copies}{repeat})"

    @property
    def overlap(self) -> Overlap:
        """Parts do not overlap, unless blocks are copied: copies are equal."""
        return Overlap.EQUAL if any(copy > 1 for copy in self.copies) else Overlap.EXCLUSIVE

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """This part's range of every block, one after another; one empty box if it holds nothing.

        `global_shape`: elements.

        Raises ValueError when the tensor lacks the dim, the blocks do not add up to it, or copies do not divide parts.
        """
        length = check_dim(global_shape, self.dim)
        if sum(self.blocks) * self.repeat != length and self.blocks:
            raise ValueError(f"{self.name}: blocks do not add up to the {length} elements of dim {self.dim}")
        if any(parts % copies for copies in self.copies):
            raise ValueError(f"{self.name}: copies do not divide {parts} parts")
        blocks = self.blocks * self.repeat or (length,)
        ranges: list[DimRange] = []
        begin = 0
        for block, copies in zip(blocks, self.copies * self.repeat or (1,) * len(blocks), strict=True):
            cut_number = index // copies
            length_of_cut, longer = divmod(block, parts // copies)
            low = begin + cut_number * length_of_cut + min(cut_number, longer)
            ranges.append((low, low + length_of_cut + (cut_number < longer), index % copies))
            begin += block
        return regions_of(global_shape, self.dim, ranges)

    def whole_shape(self, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Global shape: from the blocks if there are any, as parts may hold copies. Raises ValueError for a misfit."""
        shapes = tuple(map(tuple, local_shapes))
        return join_shapes(self, shapes, sum(self.blocks) * self.repeat if self.blocks else None)


def check_dim(shape: Sequence[int], dim: int) -> int:
    """Length of the dim. Raises ValueError when the tensor lacks it."""
    if dim >= len(shape):
        raise ValueError(f"a tensor of shape {tuple(shape)} has no dim {dim} to cut")
    return shape[dim]


def regions_of(shape: tuple[int, ...], dim: int, ranges: Iterable[DimRange]) -> tuple[RegionPair, ...]:
    """A part that holds `ranges` of a dim one after another; one empty box if it holds nothing."""
    zero = (0,) * len(shape)
    pairs = []
    local = 0
    for start, stop, copy in ranges:
        if stop > start:
            sizes = (*shape[:dim], stop - start, *shape[dim + 1 :])
            pairs.append(RegionPair(Box(_at(zero, dim, start), sizes), Box(_at(zero, dim, local), sizes), copy))
            local += stop - start
    nothing = Box(zero, (*shape[:dim], 0, *shape[dim + 1 :]))
    return tuple(pairs) or (RegionPair(nothing, nothing),)


def chunks(length: int, parts: int) -> list[tuple[int, int]]:
    """`torch.chunk` of a dim: ranges of ceil(length / parts), the last ones shorter, or empty.

    >>> chunks(9, 4)
    [(0, 3), (3, 6), (6, 9), (9, 9)]
    """
    return [chunk(length, parts, index) for index in range(parts)]


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """One of `chunks`."""
    length_of_each = -(-length // parts)
    return min(index * length_of_each, length), min((index + 1) * length_of_each, length)


def _at(offsets: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*offsets[:dim], value, *offsets[dim + 1 :])
