"""Strided: the cut of an outer mesh axis, after an inner axis has cut the same dim.

`_StridedShard(dim, split_factor)` of a DTensor (torch 2.13, `torch/distributed/tensor/placement_types.py`): tensor
parallelism has cut a dim in `split_factor` parts, and FSDP2 then cuts each of them, so that a data-parallel rank holds
one range of every part. Both cuts are those of `torch.chunk`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucp.core.layout import Overlap, Pattern
from ucp.core.region import RegionPair
from ucp_patterns.shard import check_dim, chunk, chunks, regions_of


@dataclass(frozen=True, slots=True)
class Strided(Pattern):
    """A chunk of each of the chunks of a dim, one after another.

    >>> [str(pair.global_box) for pair in Strided(dim=0, split_factor=2).regions((8,), 2, 1)]
    ['[2:4]', '[6:8]']
    """

    dim: int
    """Dim that is cut."""
    split_factor: int
    """Number of parts into which the inner axis cuts it."""
    overlap: Overlap = Overlap.EXCLUSIVE
    """Parts do not overlap."""

    def __post_init__(self) -> None:
        if self.dim < 0 or self.split_factor < 1:
            raise ValueError(f"expected a dim, and a split of 1 or more; got {self.dim}, {self.split_factor}")

    @property
    def name(self) -> str:
        """Name as printed."""
        return f"strided(dim={self.dim}, split_factor={self.split_factor})"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """This part's chunk of every chunk. `global_shape`: elements. Raises ValueError: no such dim."""
        length = check_dim(global_shape, self.dim)
        ranges = [(start, *chunk(stop - start, parts, index)) for start, stop in chunks(length, self.split_factor)]
        return regions_of(global_shape, self.dim, [(start + low, start + high, 0) for start, low, high in ranges])
