"""Replicate: every part holds all of it, and all hold the same bits (norms, biases of row-parallel layers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ucp.core.layout import Overlap, common_shape
from ucp.core.region import Box, RegionPair

__all__ = ["Replicate"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """All of the tensor on every part, equal."""

    overlap: Overlap = Overlap.EQUAL
    """The copies are compared."""

    @property
    def name(self) -> str:
        """Name as printed."""
        return "replicate"

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        """The whole, for any `index`. `global_shape`: elements."""
        del parts
        whole = Box.whole(global_shape)
        return (RegionPair(whole, whole, index),)

    def whole_shape(self, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape that all have. Raises ValueError when they differ."""
        return common_shape(local_shapes)
