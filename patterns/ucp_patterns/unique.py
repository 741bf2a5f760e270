"""Unique: one part holds the full tensor, the others nothing (pipeline stages, expert owners)."""

from __future__ import annotations

from dataclasses import dataclass

from ucp.core.layout import Overlap, Pattern
from ucp.core.region import Box, RegionPair


@dataclass(frozen=True, slots=True)
class Unique(Pattern):
    """The full tensor on one part.

    >>> Unique(owner=1).regions((4, 2), 2, 0)
    ()
    """

    owner: int = 0
    """Part that holds it."""
    overlap: Overlap = Overlap.EXCLUSIVE
    """No other part holds any of it."""

    @property
    def name(self) -> str:
        """Name as printed."""
        return "unique"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """The full tensor on the owner, nothing elsewhere. `global_shape`: elements."""
        if not 0 <= self.owner < parts:
            raise ValueError(f"owner {self.owner} is not one of {parts} parts")
        full = Box.full(global_shape)
        return (RegionPair(full, full),) if index == self.owner else ()
