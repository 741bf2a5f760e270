"""Equal parameters matched with places in order."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from ucp_formats.megatron.flat_buffer.ties import in_groups, matched, without_order

FITS = st.lists(st.lists(st.integers(0, 6), max_size=4, unique=True), max_size=5)


@given(FITS)
def test_the_extremes_bound_all_matchings(fits: list[list[int]]) -> None:
    """Against all increasing sequences: earliest and latest are their bounds: they differ where it is open."""
    every = [
        numbers
        for numbers in combinations(range(7), len(fits))
        if all(number in own for number, own in zip(numbers, fits, strict=True))
    ]
    found = matched(fits)
    if not every:
        assert found is None
    else:
        columns = list(zip(*every, strict=True))
        assert found == ([min(column) for column in columns], [max(column) for column in columns])


def test_what_one_group_has_for_sure_the_others_have_not() -> None:
    assert in_groups([[[0, 1]], [[1]]]) == [[[0]], [[1]]]
    assert in_groups([[[0, 1, 2]], [[1]]]) == [[[0, 2]], [[1]]]
    assert in_groups([[[1]], [[1]]]) is None
    assert in_groups([[[1], [0]]]) is None


def test_without_an_order_contents_alone_decide() -> None:
    assert without_order([[[1], [0, 1]], [[0, 1, 2]]]) == [[[1], [0]], [[2]]]
    assert without_order([[[0, 1], [0, 1]]]) == [[[0, 1], [0, 1]]]
