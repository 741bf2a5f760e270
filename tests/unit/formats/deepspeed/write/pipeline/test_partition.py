"""Bounds of stages are those of DeepSpeed 0.19.8; the expected ones were given by its own functions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ucp_formats.deepspeed.write.pipeline.stages import balanced_bounds, uniform_bounds

CHAIN = [88, 59, 688, 110, 0, 110, 858, 0, 76, 212, 16, 88, 0]
"""Trained elements of the layers of a chain of unequal ones."""


@pytest.mark.parametrize(
    ("weights", "stages", "bounds"),
    [
        (CHAIN, 1, (0, 13)),
        (CHAIN, 2, (0, 6, 13)),
        (CHAIN, 3, (0, 5, 8, 13)),
        (CHAIN, 4, (0, 3, 6, 8, 13)),
        (CHAIN, 5, (0, 2, 3, 6, 8, 13)),
        ([88, 72, 0, 16, 72, 88], 2, (0, 4, 6)),
        ([1, 1], 4, (0, 1, 2, 2, 2)),
        ([5, 5, 0], 2, (0, 1, 3)),
        ([0, 0, 0, 0], 2, (0, 3, 4)),
    ],
)
def test_balanced(weights: list[int], stages: int, bounds: tuple[int, ...]) -> None:
    assert balanced_bounds(weights, stages) == bounds


@pytest.mark.parametrize(
    ("layers", "stages", "bounds"),
    [(6, 4, (0, 2, 4, 5, 6)), (6, 2, (0, 3, 6)), (13, 4, (0, 4, 7, 10, 13)), (2, 3, (0, 1, 2, 2))],
)
def test_uniform(layers: int, stages: int, bounds: tuple[int, ...]) -> None:
    assert uniform_bounds(layers, stages) == bounds


@given(weights=st.lists(st.integers(0, 50), min_size=1, max_size=9), stages=st.integers(1, 5))
def test_bounds_divide_all_layers(weights: list[int], stages: int) -> None:
    for bounds in (balanced_bounds(weights, stages), uniform_bounds(len(weights), stages)):
        assert (bounds[0], bounds[-1], len(bounds)) == (0, len(weights), stages + 1)
        assert all(start <= stop for start, stop in pairwise(bounds))
