"""Tests that every pattern passes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar

import pytest

from ucp.core.layout import AxisLayout, Layout, Overlap, Pattern, compute_local_shape, infer_global_shape
from ucp.core.region import Box, RegionPair, find_gaps, intersect

Case = tuple[Pattern, tuple[int, ...], int]


class PatternContract:
    """Set `cases`; every test runs on each of them."""

    cases: ClassVar[Sequence[Case]] = ()
    """Pattern, global shape in elements, number of parts."""

    def test_there_are_cases(self) -> None:
        """A suite without cases proves nothing."""
        assert self.cases

    def test_it_is_a_pattern_with_a_name(self) -> None:
        """It has `regions`, an overlap rule, and a name that messages can print."""
        for pattern, _, _ in self.cases:
            assert isinstance(pattern, Pattern)
            assert pattern.name
            assert pattern.name.isprintable()

    def test_regions_is_pure(self) -> None:
        """The same arguments give the same regions, also after pickling for another process."""
        for pattern, shape, parts in self.cases:
            again = pickle.loads(pickle.dumps(pattern))  # noqa: S301  # our own bytes
            assert again == pattern
            assert _regions_of_parts(again, shape, parts) == _regions_of_parts(pattern, shape, parts)

    def test_regions_lie_in_the_whole(self) -> None:
        """Every box is inside the global tensor."""
        for pattern, shape, parts in self.cases:
            for pairs in _regions_of_parts(pattern, shape, parts):
                assert all(not outside(pair.global_box, shape) for pair in pairs)

    def test_regions_tile_the_local_tensor(self) -> None:
        """Boxes are in increasing local offset; together they cover the local tensor without gaps or overlaps."""
        for pattern, shape, parts in self.cases:
            for index, pairs in enumerate(_regions_of_parts(pattern, shape, parts)):
                offsets = [pair.local.offsets for pair in pairs]
                assert offsets == sorted(offsets)
                layout = Layout((AxisLayout("axis", parts, pattern),))
                local = compute_local_shape(layout, shape, {"axis": index})
                if pairs:
                    assert find_gaps(local, [pair.local for pair in pairs]) == ()

    def test_parts_hold_everything(self) -> None:
        """The regions of all parts together cover the global tensor."""
        for pattern, shape, parts in self.cases:
            boxes = [pair.global_box for pairs in _regions_of_parts(pattern, shape, parts) for pair in pairs]
            assert all(gap.owners for gap in find_gaps(shape, boxes, most=1 << 30))

    def test_parts_share_only_by_rule(self) -> None:
        """No two parts hold the same element, unless the pattern has a rule for overlaps."""
        for pattern, shape, parts in self.cases:
            if pattern.overlap is Overlap.EXCLUSIVE:
                boxes = [pair.global_box for pairs in _regions_of_parts(pattern, shape, parts) for pair in pairs]
                assert all(intersect(a, b) is None for a, b in combinations(boxes, 2))

    def test_copies_are_numbered(self) -> None:
        """Copy 0 holds every element once; no other copy holds an element twice."""
        for pattern, shape, parts in self.cases:
            pairs = [pair for pairs in _regions_of_parts(pattern, shape, parts) for pair in pairs]
            assert find_gaps(shape, [pair.global_box for pair in pairs if pair.copy == 0]) == ()
            for number in {pair.copy for pair in pairs}:
                boxes = [pair.global_box for pair in pairs if pair.copy == number]
                assert all(intersect(a, b) is None for a, b in combinations(boxes, 2))

    def test_the_whole_has_the_shape_that_was_cut(self) -> None:
        """`whole_shape` computes the global shape from the local shapes that `regions` gives."""
        for pattern, shape, parts in self.cases:
            layout = Layout((AxisLayout("axis", parts, pattern),))
            local_shapes = [compute_local_shape(layout, shape, {"axis": index}) for index in range(parts)]
            assert pattern.whole_shape(local_shapes) == tuple(shape)
            assert infer_global_shape(layout, local_shapes) == tuple(shape)

    def test_parts_that_do_not_fit_have_no_whole(self) -> None:
        """Local shapes that differ in more dims than the pattern can explain raise a ValueError."""
        for pattern, shape, parts in self.cases:
            if parts > 1 and len(shape) > 1 and all(shape):
                other = tuple(length + 7 for length in shape)
                local_shapes = [other if index % 2 else tuple(shape) for index in range(parts)]
                with pytest.raises(ValueError, match="expected"):
                    pattern.whole_shape(local_shapes)


def _regions_of_parts(pattern: Pattern, shape: tuple[int, ...], parts: int) -> list[tuple[RegionPair, ...]]:
    return [pattern.regions(shape, parts, index) for index in range(parts)]


def outside(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box is not completely inside a tensor of that shape."""
    return len(box.sizes) != len(shape) or any(stop > length for stop, length in zip(box.stops, shape, strict=True))
