"""In-order assignment against trying everything."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.core.assign import FlatSlots, ManyWaysError, SlotGroup, Slots, bounds, narrow, narrow_in_order, possible_places

FITS = st.lists(st.lists(st.integers(0, 6), max_size=4, unique=True).map(sorted), max_size=5)


@st.composite
def deals(draw):
    """Stages of groups, and layers of shapes: dealt at random, so that one assignment fits at least."""
    layers = draw(st.lists(st.lists(st.sampled_from([(2,), (3,), (2, 2)]), min_size=1, max_size=3), max_size=3))
    starts = [0, *sorted(draw(st.lists(st.integers(0, len(layers)), max_size=1))), len(layers)]
    stages: list[list[SlotGroup]] = []
    for first, last in pairwise(starts):
        shapes = [shape for layer in layers[first:last] for shape in layer]
        count = draw(st.integers(1, 2))
        homes = [draw(st.integers(-1, count - 1)) for _ in shapes]
        groups: list[SlotGroup] = []
        for group in range(count):
            own = [shape for shape, home in zip(shapes, homes, strict=True) if home == group]
            if draw(st.booleans()):
                groups.append(FlatSlots(sum(map(prod, own))))
            else:
                groups.append(Slots(tuple(None if draw(st.integers(0, 4)) == 0 else shape for shape in own)))
        stages.append(groups)
    return stages, layers


def every_deal(groups: list[SlotGroup], shapes: list[tuple[int, ...]]):
    """Places of all parameters, one tuple for each assignment to the groups of one stage."""
    for homes in product(range(-1, len(groups)), repeat=len(shapes)):
        positions = [0] * len(groups)
        places = []
        for home, shape in zip(homes, shapes, strict=True):
            after = 0 if home < 0 else groups[home].after(positions[home], shape)
            if after is None:
                break
            places.append(None if home < 0 else (home, positions[home]))
            if home >= 0:
                positions[home] = after
        else:
            if all(at == group.length for at, group in zip(positions, groups, strict=True)):
                yield tuple(places)


@given(case=deals())
def test_places_are_those_of_all_assignments(case) -> None:
    stages, layers = case
    if len(stages) == 1:
        every = list(every_deal(stages[0], [shape for layer in layers for shape in layer]))
        assert possible_places(stages, layers) == [set(column) for column in zip(*every, strict=True)]
        assert every, "the case was made from an assignment"


def test_a_large_model_is_quick_and_a_boundless_one_is_given_up() -> None:
    layers = [[(64, 64), (64,)] for _ in range(400)]
    places = possible_places([[Slots(((64, 64),) * 400), Slots(((64,),) * 400)]], layers)
    assert places is not None
    assert [places[0], places[1], places[-1]] == [{(0, 0)}, {(1, 0)}, {(1, 399)}]
    with pytest.raises(ManyWaysError):
        possible_places([[Slots((None,) * 40)] * 3], [[(2,)] * 200], most=1000)


@given(FITS)
def test_bounds_are_those_of_all_increasing_sequences(fits: list[list[int]]) -> None:
    """They differ where it is open."""
    every = [
        numbers
        for numbers in combinations(range(7), len(fits))
        if all(number in own for number, own in zip(numbers, fits, strict=True))
    ]
    result = bounds(fits)
    if not every:
        assert result is None
    else:
        columns = list(zip(*every, strict=True))
        assert result == ([min(column) for column in columns], [max(column) for column in columns])


@given(FITS)
def test_narrowing_loses_no_answer(fits: list[list[int]]) -> None:
    every = [
        numbers
        for numbers in permutations(range(7), len(fits))
        if all(number in own for number, own in zip(numbers, fits, strict=True))
    ]
    for numbers in every:
        assert all(number in own for number, own in zip(numbers, narrow([fits])[0], strict=True))


def test_what_one_row_has_for_sure_the_others_have_not() -> None:
    assert narrow_in_order([[[0, 1]], [[1]]]) == [[[0]], [[1]]]
    assert narrow_in_order([[[0, 1, 2]], [[1]]]) == [[[0, 2]], [[1]]]
    assert narrow_in_order([[[1]], [[1]]]) is None
    assert narrow_in_order([[[1], [0]]]) is None


def test_without_an_order_contents_alone_decide() -> None:
    assert narrow([[[1], [0, 1]], [[0, 1, 2]]]) == [[[1], [0]], [[2]]]
    assert narrow([[[0, 1], [0, 1]]]) == [[[0, 1], [0, 1]]]
