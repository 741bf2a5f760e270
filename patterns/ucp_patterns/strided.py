"""Strided: a dim that an inner axis of the mesh cuts first, and an outer one cuts after it.

`_StridedShard(dim, split_factor)` of a DTensor (torch 2.13, `torch/distributed/tensor/placement_types.py`): tensor
parallelism has cut a dim in `split_factor` parts, and FSDP2 then cuts each of them, so that a data-parallel rank holds
one stretch of every part. Both cuts are those of `torch.chunk`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ucp.core.layout import Overlap
from ucp.core.region import RegionPair
from ucp_patterns.dim import check_dim, chunk, chunks, joined_shape, regions_of

__all__ = ["Strided"]


@dataclass(frozen=True, slots=True)
class Strided:
    """A chunk of each of the chunks of a dim, one after another.

    >>> [str(pair.whole) for pair in Strided(dim=0, split_factor=2).regions((8,), 2, 1)]
    ['[2:4]', '[6:8]']
    """

    dim: int
    """Dim that is cut."""
    split_factor: int
    """Parts that the inner axis cuts it in."""
    overlap: Overlap = Overlap.EXCLUSIVE
    """Parts share nothing."""

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
        return regions_of(global_shape, self.dim, [(*own, 0) for own in self._held(length, parts, index)])

    def whole_shape(self, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shapes with their lengths of the dim added up. Raises ValueError when they are not those of chunks."""
        parts = len(local_shapes)
        length = sum(check_dim(shape, self.dim) for shape in local_shapes)
        wanted = [sum(high - low for low, high in self._held(length, parts, index)) for index in range(parts)]
        return joined_shape(self.name, self.dim, local_shapes, wanted=wanted, length=length)

    def _held(self, length: int, parts: int, index: int) -> Iterator[tuple[int, int]]:
        for start, stop in chunks(length, self.split_factor):
            low, high = chunk(stop - start, parts, index)
            yield start + low, start + high
