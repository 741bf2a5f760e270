"""Unique: one part holds all of it, the others nothing (pipeline stages, expert owners)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ucp.core.layout import Overlap
from ucp.core.region import Box, RegionPair

__all__ = ["Unique"]


@dataclass(frozen=True, slots=True)
class Unique:
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
        whole = Box.whole(global_shape)
        return (RegionPair(whole, whole),) if index == self.owner else ()

    def whole_shape(self, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape that the owner has. Raises ValueError when another part holds elements."""
        if not 0 <= self.owner < len(local_shapes):
            raise ValueError(f"owner {self.owner} is none of {len(local_shapes)} parts")
        others = [shape for index, shape in enumerate(local_shapes) if index != self.owner and shape and all(shape)]
        if others:
            raise ValueError(f"expected elements on part {self.owner} only; got {[list(shape) for shape in others]}")
        return tuple(local_shapes[self.owner])
