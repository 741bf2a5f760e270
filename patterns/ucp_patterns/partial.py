"""Partial: every part holds its own version of the tensor; the result is their mean (paper, "params_to_average")."""

from __future__ import annotations

from dataclasses import dataclass

from ucp.core.layout import Overlap, Pattern
from ucp.core.region import Box, RegionPair


@dataclass(frozen=True, slots=True)
class Partial(Pattern):
    """The full tensor on every part, each updated on its own."""

    overlap: Overlap = Overlap.MEAN
    """The global tensor is the mean."""

    @property
    def name(self) -> str:
        """Name as printed."""
        return "partial"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """The full tensor, for any `index`. `global_shape`: elements."""
        del parts
        full = Box.full(global_shape)
        return (RegionPair(full, full, index),)
