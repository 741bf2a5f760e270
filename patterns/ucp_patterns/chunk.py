"""Chunk: a dim is cut into parts of ceil(length / parts), as `torch.chunk` does; the last ones are shorter, or empty.

On dim 0 it is `Shard(0)` of a DTensor (FSDP2). On a flattened tensor it is how FSDP1 shards, and ZeRO-3, where every
rank stores ceil(numel / ranks) elements, padded at the end (`partition_parameters.py`, DeepSpeed 0.19.8).
"""

from __future__ import annotations

from dataclasses import dataclass

from ucp.core.layout import Overlap, Pattern
from ucp.core.region import RegionPair
from ucp_patterns.shard import check_dim, chunk, regions_of


@dataclass(frozen=True, slots=True)
class Chunk(Pattern):
    """A dim cut into chunks.

    >>> [str(pair.global_box) for index in range(4) for pair in Chunk(0).regions((9,), 4, index)]
    ['[0:3]', '[3:6]', '[6:9]', '[0:0]']
    """

    dim: int
    """Dim that is cut."""
    overlap: Overlap = Overlap.EXCLUSIVE
    """Parts do not overlap."""

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"expected a dim that is not negative; got {self.dim}")

    @property
    def name(self) -> str:
        """Name as printed."""
        return f"chunk(dim={self.dim})"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """The chunk of part `index`, empty past the end. `global_shape`: elements. Raises ValueError: no such dim."""
        start, stop = chunk(check_dim(global_shape, self.dim), parts, index)
        return regions_of(global_shape, self.dim, [(start, stop, 0)])
