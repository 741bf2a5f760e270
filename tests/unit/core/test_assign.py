"""Slots of the optimizers of a pipeline's stages, matched with whole layers; of one optimizer: the property tests."""

from __future__ import annotations

import pytest

from ucp.core.assign import FlatSlots, SlotGroup, Slots, possible_places

Layer = list[tuple[str, tuple[int, ...]]]

LAYERS: list[Layer] = [
    [("0.weight", (7, 4))],
    [("1.weight", (4, 4)), ("1.bias", (4,))],
    [("3.weight", (4, 4))],
    [("4.weight", (4, 7))],
]


def alike(count: int) -> list[Layer]:
    return [[(f"{number}.weight", (4, 4)), (f"{number}.bias", (4,))] for number in range(count)]


def stage(layers: int) -> list[SlotGroup]:
    return [Slots(((4, 4), (4,)) * layers)]


def names(stages: list[list[SlotGroup]], layers: list[Layer]) -> list[tuple[tuple[str, ...], ...]] | None:
    """Names of each group of every stage; None where nothing fits, or several assignments do."""
    places = possible_places(stages, [[shape for _, shape in layer] for layer in layers])
    if places is None or any(len(own) > 1 for own in places):
        return None
    every = [(name, own.pop()) for (name, _), own in zip([p for layer in layers for p in layer], places, strict=True)]
    members = [tuple(name for name, place in every if place and place[0] == at) for at in range(sum(map(len, stages)))]
    groups = iter(members)
    return [tuple(next(groups) for _ in own) for own in stages]


def test_the_one_way_that_fits() -> None:
    stages: list[list[SlotGroup]] = [[Slots(((7, 4), (4, 4), (4,)))], [Slots(((4, 4), (4, 7)))]]
    expected = [(("0.weight", "1.weight", "1.bias"),), (("3.weight", "4.weight"),)]
    assert names(stages, LAYERS) == expected
    frozen: Layer = [("2.frozen", (9, 9))]
    assert names(stages, [*LAYERS[:2], frozen, *LAYERS[2:]]) == expected


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (1, 2, 1)])
def test_alike_layers_that_are_all_used(counts: tuple[int, ...]) -> None:
    found = names([stage(count) for count in counts], alike(4))
    assert found is not None
    assert [len(own[0]) for own in found] == [2 * count for count in counts]
    assert [name for own in found for name in own[0]] == [name for layer in alike(4) for name, _ in layer]


def test_alike_layers_in_two_groups_and_in_flat_ones() -> None:
    apart: list[list[SlotGroup]] = [[Slots(((4, 4),) * 2), Slots(((4,),) * 2)]] * 2
    expected = [(f"{a}.weight", f"{a + 1}.weight") for a in (0, 2)], [(f"{a}.bias", f"{a + 1}.bias") for a in (0, 2)]
    assert names(apart, alike(4)) == list(zip(*expected, strict=True))
    flat: list[list[SlotGroup]] = [[FlatSlots(40)], [FlatSlots(40)]]
    halves = [[name for layer in alike(4)[at : at + 2] for name, _ in layer] for at in (0, 2)]
    assert names(flat, alike(4)) == [(tuple(half),) for half in halves]


def test_optimizers_without_states_have_slots_all_the_same() -> None:
    """As before the first step."""
    unknown: list[list[SlotGroup]] = [[Slots((None,) * 6)], [Slots((None,) * 2)]]
    assert names(unknown, alike(4)) == [(tuple(n for own in alike(3) for n, _ in own),), (("3.weight", "3.bias"),)]


def test_alike_layers_of_which_some_are_frozen_are_not_guessed() -> None:
    places = possible_places([stage(2), stage(1)], [[shape for _, shape in layer] for layer in alike(4)])
    assert places is not None
    assert any(len(own) > 1 for own in places)


def test_no_layer_is_on_two_stages_and_none_is_without_a_file() -> None:
    assert possible_places([[Slots(((4, 4),))], [Slots(((4,),))]], [[(4, 4), (4,)]]) is None
    stages: list[list[SlotGroup]] = [[Slots(((7, 4), (4, 4), (4,)))], [Slots(((4, 4), (4, 7), (7, 4)))]]
    assert possible_places(stages, [[shape for _, shape in layer] for layer in LAYERS]) is None


def test_the_last_stage_may_train_nothing() -> None:
    stages = [stage(2), []]
    assert names(stages, alike(2)) == [(tuple(name for layer in alike(2) for name, _ in layer),), ()]
    assert possible_places([stage(1), []], [[(4, 4), (4,)], [(9, 9)]]) == [{(0, 0)}, {(0, 1)}, {None}]
