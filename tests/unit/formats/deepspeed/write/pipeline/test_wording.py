"""Layers and stages in messages."""

from __future__ import annotations

from ucp_formats.deepspeed.write.pipeline.wording import layers_shown, numbers_shown


def test_numbers_that_follow_each_other_are_a_range() -> None:
    assert numbers_shown([]) == ""
    assert numbers_shown([4, 4]) == "4"
    assert numbers_shown([9, 3, 2, 1, 7]) == "1-3, 7, 9"


def test_empty_stages_are_counted_and_bounds_told_only_where_they_can_be_asked_for() -> None:
    assert layers_shown([0, 2, 3]) == "layers 0-1 | 2 (stages=0,2,3)"
    assert layers_shown([0, 2, 2, 3, 3, 3]) == "layers 0-1 | none | 2 | none in 2 stages"
    assert layers_shown([0, 1, *[1] * 44]) == "layers 0 | none in 44 stages"


def test_many_stages_of_as_many_layers_are_one_range() -> None:
    shown = layers_shown([0, 3, 5, 7, 9, 11, 13, 14])
    assert shown == "layers 0-2 | 3-12 in 5 stages of 2 | 13 (stages=0,3,5,7,9,11,13,14)"
    assert layers_shown([0, 1, 2, 3, 4]).startswith("layers 0 | 1 | 2 | 3 (")
