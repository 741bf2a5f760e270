"""Slots of the optimizers of a pipeline's stages, matched with whole layers; of one optimizer: the property tests."""

from __future__ import annotations

import pytest
from ucp_formats.deepspeed.read.optimizer.match_slots import (
    AmbiguousError,
    FlatSlots,
    NoMatchError,
    SlotGroup,
    Slots,
    match_stages,
)

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


def names(stages: list[list[SlotGroup]], layers: list[Layer]) -> list[tuple[tuple[str, ...], ...]]:
    return list(match_stages(stages, layers))


def test_the_one_way_that_fits() -> None:
    stages: list[list[SlotGroup]] = [[Slots(((7, 4), (4, 4), (4,)))], [Slots(((4, 4), (4, 7)))]]
    expected = [(("0.weight", "1.weight", "1.bias"),), (("3.weight", "4.weight"),)]
    assert names(stages, LAYERS) == expected
    frozen: Layer = [("2.frozen", (9, 9))]
    assert names(stages, [*LAYERS[:2], frozen, *LAYERS[2:]]) == expected


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (1, 2, 1)])
def test_alike_layers_that_are_all_used(counts: tuple[int, ...]) -> None:
    found = names([stage(count) for count in counts], alike(4))
    assert [len(own[0]) for own in found] == [2 * count for count in counts]
    assert [name for own in found for name in own[0]] == [name for layer in alike(4) for name, _ in layer]


def test_alike_layers_in_two_groups_and_in_flat_ones() -> None:
    apart: list[list[SlotGroup]] = [[Slots(((4, 4),) * 2), Slots(((4,),) * 2)]] * 2
    weights, biases = names(apart, alike(4))[1]
    assert (weights, biases) == (("2.weight", "3.weight"), ("2.bias", "3.bias"))
    flat: list[list[SlotGroup]] = [[FlatSlots(40)], [FlatSlots(40)]]
    assert names(flat, alike(4))[0] == (("0.weight", "0.bias", "1.weight", "1.bias"),)


def test_optimizers_without_states_have_slots_all_the_same() -> None:
    """As before the first step."""
    unknown: list[list[SlotGroup]] = [[Slots((None,) * 6)], [Slots((None,) * 2)]]
    assert len(names(unknown, alike(4))[0][0]) == 6


def test_alike_layers_of_which_some_are_frozen_are_not_guessed() -> None:
    with pytest.raises(AmbiguousError) as caught:
        names([stage(2), stage(1)], alike(4))
    assert set(caught.value.names) <= {name for layer in alike(4) for name, _ in layer}


def test_no_layer_is_on_two_stages() -> None:
    with pytest.raises(NoMatchError):
        names([[Slots(((4, 4),))], [Slots(((4,),))]], alike(1))


def test_a_tied_layer_without_a_file() -> None:
    with pytest.raises(NoMatchError):
        names([[Slots(((7, 4), (4, 4), (4,)))], [Slots(((4, 4), (4, 7), (7, 4)))]], LAYERS)
