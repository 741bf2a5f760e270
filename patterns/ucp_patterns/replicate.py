"""Replicate: every part holds the full tensor, bit for bit the same (norms, biases of row-parallel layers).

`holders` limits this to some parts, as for an embedding that the first and last stages of a pipeline share.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucp.core.layout import Overlap, Pattern
from ucp.core.region import Box, RegionPair


@dataclass(frozen=True, slots=True)
class Replicate(Pattern):
    """The full tensor on every part, or on `holders`; the copies are equal.

    >>> [len(Replicate(holders=(0, 3)).regions((4, 2), 4, index)) for index in range(4)]
    [1, 0, 0, 1]
    """

    holders: tuple[int, ...] = ()
    """Parts that hold it, increasing; empty for all."""
    overlap: Overlap = Overlap.EQUAL
    """The copies are compared."""

    def __post_init__(self) -> None:
        if list(self.holders) != sorted(set(self.holders)) or min(self.holders, default=0) < 0:
            raise ValueError(f"expected parts in increasing order; got {self.holders}")

    @property
    def name(self) -> str:
        """Name as printed."""
        return f"replicate(holders={list(self.holders)})" if self.holders else "replicate"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """The full tensor, for any `index` that holds it. `global_shape`: elements."""
        if self.holders and self.holders[-1] >= parts:
            raise ValueError(f"holders {list(self.holders)} are not all among {parts} parts")
        if self.holders and index not in self.holders:
            return ()
        full = Box.full(global_shape)
        return (RegionPair(full, full, self.holders.index(index) if self.holders else index),)
