"""Partition: the range of a flattened parameter in one part's share of a flat buffer.

ZeRO-1/2 and BF16_Optimizer put the parameters of a group end to end in a buffer, and each rank has `share` elements of
it (`stage_1_and_2.py`, DeepSpeed 0.19.8). Megatron's distributed optimizer does so bucket by bucket
(`param_and_grad_buffer.py`, core_v0.16). `start` and `share` follow from the order, the sizes and the alignment of all
parameters; together they give what a part holds of this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ucp.core.layout import Overlap, Pattern
from ucp.core.region import Box, RegionPair


@dataclass(frozen=True, slots=True)
class Partition(Pattern):
    """The elements of a flattened parameter in the share of each part.

    >>> [str(pair.global_box) for index in range(2) for pair in Partition(start=3, share=4).regions((4,), 2, index)]
    ['[0:1]', '[1:4]']
    """

    start: int
    """Element of the buffer where the parameter starts."""
    share: int
    """Elements of the buffer that each part holds, padding counted."""
    overlap: Overlap = field(default=Overlap.EXCLUSIVE, repr=False)
    """Parts do not overlap."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.share < 0:
            raise ValueError(f"expected a start and a share that are not negative; got {self.start}, {self.share}")

    @property
    def name(self) -> str:
        """Name as printed: the same for all parameters of a buffer."""
        return f"partition(share={self.share})"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """Elements of a parameter of shape (numel,) in the share of part `index`; none if they do not overlap.

        Raises ValueError for a shape that is not flat, or one that leaves the buffer.
        """
        if len(global_shape) != 1:
            raise ValueError(f"expected a flattened tensor; got one of shape {global_shape}")
        (numel,) = global_shape
        if self.start + numel > parts * self.share:
            raise ValueError(
                f"elements {self.start} to {self.start + numel} leave a buffer of {parts} x {self.share} elements"
            )
        low, high = index * self.share - self.start, (index + 1) * self.share - self.start
        start, stop = max(low, 0), min(high, numel)
        if start >= stop:
            return ()
        return (RegionPair(Box((start,), (stop - start,)), Box((0,), (stop - start,))),)
