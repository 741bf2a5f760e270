"""Touched: a part holds a parameter in full if its share of the buffer has at least one element of the parameter.

Muon keeps its momentum this way under ZeRO-1/2, because it orthogonalises full matrices (`_muon_momentum_buffer`,
`stage_1_and_2.py`, DeepSpeed 0.19.8). The buffer is that of `Partition`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ucp.core.layout import Overlap, Pattern
from ucp.core.region import Box, RegionPair


@dataclass(frozen=True, slots=True)
class Touched(Pattern):
    """A full flattened parameter on every part whose share it touches; the copies are equal.

    >>> [len(Touched(start=3, share=4).regions((4,), 3, index)) for index in range(3)]
    [1, 1, 0]
    """

    start: int
    """Element of the buffer where the parameter starts."""
    share: int
    """Elements of the buffer that each part holds, padding counted."""
    overlap: Overlap = field(default=Overlap.EQUAL, repr=False)
    """The copies are compared."""

    @property
    def name(self) -> str:
        """Name as printed: the same for all parameters of a buffer."""
        return f"touched(share={self.share})"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """A full parameter of shape (numel,), if the share of part `index` has any of it.

        Raises ValueError for a shape that is not flat, or one that leaves the buffer.
        """
        if len(global_shape) != 1:
            raise ValueError(f"expected a flattened tensor; got one of shape {global_shape}")
        stop = self.start + global_shape[0]
        if stop > parts * self.share:
            raise ValueError(f"elements {self.start} to {stop} leave a buffer of {parts} x {self.share} elements")
        if not self.start < (index + 1) * self.share or not stop > index * self.share:
            return ()
        full = Box.full(global_shape)
        return (RegionPair(full, full, index - self.start // self.share),) if global_shape[0] else ()
