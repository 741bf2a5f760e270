"""Cut: a dim is cut into parts of recorded widths, block by block.

It records widths that `Shard` would compute: for attention heads that do not divide evenly, different numbers of query
heads and key/value heads, or cuts only at multiples of some size. A part holds its range of every block, one after
another; a width may be 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ucp.core.layout import Overlap, Pattern
from ucp.core.region import RegionPair
from ucp_patterns.shard import check_dim, regions_of


@dataclass(frozen=True, slots=True)
class Cut(Pattern):
    """A dim whose blocks are each cut into recorded widths.

    >>> [str(pair.global_box) for pair in Cut(dim=0, widths=((3, 1), (1, 1))).regions((6, 2), 2, 1)]
    ['[3:4, 0:2]', '[5:6, 0:2]']
    """

    dim: int
    """Dim that is cut."""
    widths: tuple[tuple[int, ...], ...]
    """Elements of each block, in its order, on each part."""
    overlap: Overlap = Overlap.EXCLUSIVE
    """Parts do not overlap."""

    def __post_init__(self) -> None:
        if self.dim < 0 or any(width < 0 for block in self.widths for width in block):
            raise ValueError(f"expected a dim and widths that are not negative; got {self.dim}, {self.widths}")

    @property
    def name(self) -> str:
        """Name as printed."""
        return f"cut(dim={self.dim}, widths={[list(block) for block in self.widths]})"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """This part's range of every block, one after another; one empty box if it holds nothing.

        `global_shape`: elements.

        Raises ValueError if the tensor lacks the dim, or the widths do not fit it and the number of parts.
        """
        length = check_dim(global_shape, self.dim)
        if sum(map(sum, self.widths)) != length or any(len(block) != parts for block in self.widths):
            raise ValueError(
                f"widths {self.widths} do not cut the {length} elements of dim {self.dim} into {parts} parts"
            )
        begins = accumulate(map(sum, self.widths), initial=0)
        starts = [begin + sum(block[:index]) for begin, block in zip(begins, self.widths, strict=False)]
        ranges = [(start, start + block[index], 0) for start, block in zip(starts, self.widths, strict=True)]
        return regions_of(global_shape, self.dim, ranges)
