"""A dim cut in stretches: what all patterns that cut one dim have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ucp.core.region import Box, RegionPair

DimRange = tuple[int, int, int]
"""First element and one past the last, of the dim of the whole; and which copy of them it is."""


def check_dim(shape: Sequence[int], dim: int) -> int:
    """Length of the dim. Raises ValueError when the tensor lacks it."""
    if dim >= len(shape):
        raise ValueError(f"a tensor of shape {tuple(shape)} has no dim {dim} to cut")
    return shape[dim]


def regions_of(shape: tuple[int, ...], dim: int, ranges: Iterable[DimRange]) -> tuple[RegionPair, ...]:
    """A part that holds `ranges` of a dim one after another; one empty box where that is nothing."""
    zero = (0,) * len(shape)
    pairs = []
    local = 0
    for start, stop, copy in ranges:
        if stop > start:
            sizes = (*shape[:dim], stop - start, *shape[dim + 1 :])
            pairs.append(RegionPair(Box(_at(zero, dim, start), sizes), Box(_at(zero, dim, local), sizes), copy))
            local += stop - start
    nothing = Box(zero, (*shape[:dim], 0, *shape[dim + 1 :]))
    return tuple(pairs) or (RegionPair(nothing, nothing),)


def chunks(length: int, parts: int) -> list[tuple[int, int]]:
    """`torch.chunk` of a dim: stretches of ceil(length / parts), the last ones shorter, or empty.

    >>> chunks(9, 4)
    [(0, 3), (3, 6), (6, 9), (9, 9)]
    """
    return [chunk(length, parts, index) for index in range(parts)]


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """One of `chunks`."""
    length_of_each = -(-length // parts)
    return min(index * length_of_each, length), min((index + 1) * length_of_each, length)


def _at(offsets: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*offsets[:dim], value, *offsets[dim + 1 :])
