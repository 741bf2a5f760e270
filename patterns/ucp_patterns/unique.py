"""Unique: one part holds all of it, the others nothing (pipeline stages, expert owners)."""

from __future__ import annotations

from dataclasses import dataclass

from ucp.core.layout import Overlap, Pattern
from ucp.core.region import Box, RegionPair


@dataclass(frozen=True, slots=True)
class Unique(Pattern):
    """All of the tensor on one part.

    >>> Unique(owner=1).regions((4, 2), 2, 0)
    ()
    """

    owner: int = 0
    """Part that holds it."""
    overlap: Overlap = Overlap.EXCLUSIVE
    """Nobody else may."""

    @property
    def name(self) -> str:
        """Name as printed."""
        return "unique"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """The whole on the owner, nothing elsewhere. `global_shape`: elements."""
        if not 0 <= self.owner < parts:
            raise ValueError(f"owner {self.owner} is none of {parts} parts")
        full = Box.full(global_shape)
        return (RegionPair(full, full),) if index == self.owner else ()
