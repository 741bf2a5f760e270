"""Laws of boxes: flat ranges, intersection, composition, and the proof that boxes tile a whole."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import boxes_in, shapes, tilings
from ucp.core.region import Box, RegionPair, cut_flat_range, find_gaps, intersect


def positions(shape: tuple[int, ...], box: Box) -> np.ndarray:
    """Row-major positions of the elements of a box."""
    return np.arange(prod(shape)).reshape(shape)[index_of(box)].reshape(-1)


def index_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def draw_range(data: st.DataObject, numel: int) -> tuple[int, int]:
    return tuple(sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel)))))


@given(shapes(most_dims=4), st.data())
def test_flat_boxes_are_the_range_in_order(shape, data):
    start, stop = draw_range(data, prod(shape))
    found = [positions(shape, box) for box in cut_flat_range(shape, start, stop)]
    assert np.concatenate([np.arange(0), *found]).tolist() == list(range(start, stop))


@given(shapes(most_dims=5, most=5), st.data())
def test_flat_boxes_are_few_and_contiguous(shape, data):
    start, stop = draw_range(data, prod(shape))
    boxes = cut_flat_range(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        assert box.is_flat_in(shape)
        assert box.numel


@given(shapes(), st.data())
def test_is_flat_in_means_consecutive(shape, data):
    box = data.draw(boxes_in(shape))
    held = positions(shape, box)
    consecutive = held.size <= 1 or bool((np.diff(held) == 1).all())
    assert box.is_flat_in(shape) == consecutive
    if held.size:
        assert box.flat_start(shape) == held[0]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_the_tensor_is_refused(start, stop):
    with pytest.raises(ValueError, match=rf"range {start}:{stop} .*\(2, 3\)"):
        cut_flat_range((2, 3), start, stop)


@given(shapes(), st.data())
def test_intersection_is_what_both_hold(shape, data):
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = set(positions(shape, a)) & set(positions(shape, b))
    shared = intersect(a, b)
    assert (set(positions(shape, shared)) if shared else set()) == both
    assert intersect(b, a) == shared


@st.composite
def maps(draw, inner: tuple[int, ...], outer: tuple[int, ...]) -> tuple[RegionPair, ...]:
    """Some boxes of `outer`, each laid somewhere in `inner`."""
    pairs = []
    for _ in range(draw(st.integers(0, 3))):
        sizes = tuple(draw(st.integers(0, min(a, b))) for a, b in zip(inner, outer, strict=True))
        places = [tuple(draw(st.integers(0, n - s)) for n, s in zip(of, sizes, strict=True)) for of in (outer, inner)]
        pairs.append(RegionPair(Box(places[0], sizes), Box(places[1], sizes)))
    return tuple(pairs)


def compose(outer: tuple[RegionPair, ...], inner: tuple[RegionPair, ...]) -> tuple[RegionPair, ...]:
    """Where the pieces of a piece lie in the whole."""
    return tuple(pair for far in outer for near in inner if (pair := near.after(far)) is not None)


@given(st.integers(0, 3), st.data())
def test_composition_follows_every_element(ndim, data):
    a, b, c = (data.draw(shapes(least_dims=ndim, most_dims=ndim, least=1)) for _ in range(3))
    outer, inner = data.draw(maps(b, a)), data.draw(maps(c, b))

    def moves(pairs, whole, local):
        return [
            move
            for pair in pairs
            for move in zip(positions(whole, pair.global_box), positions(local, pair.local), strict=True)
        ]

    far, near = moves(outer, a, b), moves(inner, b, c)
    wanted = sorted((whole, local) for whole, middle in far for other, local in near if middle == other)
    assert sorted(moves(compose(outer, inner), a, c)) == wanted


@given(shapes(most_dims=3, most=5), st.data())
def test_uncovered_finds_exactly_the_holes_and_overlaps(shape, data):
    boxes = list(data.draw(tilings(shape)))
    if boxes and data.draw(st.booleans()):
        boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    boxes += data.draw(st.lists(boxes_in(shape), max_size=3))
    held = np.zeros(shape, dtype=int)
    for box in boxes:
        held[index_of(box)] += 1
    found = np.ones(shape, dtype=int)
    for gap in find_gaps(shape, boxes, most=1 << 30):
        assert (found[index_of(gap.box)] == 1).all(), "a gap is named twice"
        found[index_of(gap.box)] = len(gap.owners)
        for owner in range(len(boxes)):
            assert (intersect(boxes[owner], gap.box) is not None) == (owner in gap.owners)
    assert (found == held).all()


@given(shapes(least=1), st.data())
def test_most_bounds_the_gaps(shape, data):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=6))
    every = find_gaps(shape, boxes, most=1 << 30)
    for most in range(1, 4):
        assert find_gaps(shape, boxes, most=most) == every[:most]


@given(shapes(least_dims=1), st.data())
def test_a_box_past_the_shape_is_refused(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = Box.full(shape)
    sizes = (*whole.sizes[:dim], whole.sizes[dim] + 1, *whole.sizes[dim + 1 :])
    for box in (Box(whole.offsets, sizes), Box((0, *whole.offsets), (1, *whole.sizes))):
        with pytest.raises(ValueError, match=re.escape(str(box))):
            find_gaps(shape, [box])


@pytest.mark.parametrize(
    ("offsets", "sizes"), [((0,), (1, 2)), ((-1,), (1,)), ((0,), (-1,))], ids=["dims", "offset", "size"]
)
def test_an_invalid_box_cannot_exist(offsets, sizes):
    with pytest.raises(ValueError, match=re.escape(str(offsets))):
        Box(offsets, sizes)
