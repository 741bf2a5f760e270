"""`plan_save`: every item once, by a rank that holds it, evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.core.region import Box
from ucp.errors import UnsupportedError, UsageError
from ucp.saving.plan import PartialExperts, SaveItem, choose_by_turns, plan_save


def make_item(number: int, nbytes: int) -> SaveItem:
    return SaveItem(param=f"p{number}", state="weight", boxes=(Box((0,), (nbytes,)),), nbytes=nbytes)


def deal(ranks: int, masks: list[tuple[int, int]]) -> list[list[SaveItem]]:
    """What each rank holds; bit r of a mask says that rank r holds the item."""
    return [
        [
            make_item(number, nbytes)
            for number, (mask, nbytes) in enumerate(masks)
            if mask >> rank & 1 or mask % ranks == rank
        ]
        for rank in range(ranks)
    ]


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 31), st.integers(1, 100)), max_size=12))
def test_every_item_is_written_once_by_a_rank_that_holds_it(ranks: int, masks: list[tuple[int, int]]) -> None:
    held = deal(ranks, masks)
    shares = plan_save(held)
    assert all(set(share) <= set(items) for share, items in zip(shares, held, strict=True))
    written = [item for share in shares for item in share]
    assert sorted(written, key=lambda item: item.param) == sorted(
        {item for items in held for item in items}, key=lambda item: item.param
    )


@given(st.integers(1, 6), st.lists(st.integers(1, 100), max_size=30))
def test_replicas_are_dealt_evenly(ranks: int, sizes: list[int]) -> None:
    shares = plan_save([[make_item(number, nbytes) for number, nbytes in enumerate(sizes)]] * ranks)
    loads = [sum(item.nbytes for item in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_what_one_rank_alone_holds_counts_first() -> None:
    shared = [make_item(number, 10) for number in range(4)]
    shares = plan_save([[*shared, make_item(9, 20)], shared, shared])
    assert [len(share) for share in shares] == [1, 2, 2]


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 16), st.integers(1, 6))
"""ep, experts of a rank, k, layers."""


@given(SIZES, st.integers(0, 50))
def test_every_expert_is_saved_in_as_few_saves_as_can_be(sizes: tuple[int, int, int, int], start: int) -> None:
    ep, of_rank, k, layers = sizes
    experts = ep * of_rank
    k = min(k, experts)
    for layer in range(layers):
        turns = range(start, start - (-experts // k))
        chosen = [choose_by_turns(k, turn=turn, layer=layer, experts=experts, ep=ep) for turn in turns]
        assert set().union(*chosen) == set(range(experts))
        assert all(len(set(of_turn)) == k for of_turn in chosen)


@given(SIZES)
def test_ranks_write_equally_many_experts_iff_k_times_layers_is_a_multiple_of_ep(
    sizes: tuple[int, int, int, int],
) -> None:
    ep, of_rank, k, layers = sizes
    experts = ep * of_rank
    k = min(k, experts)
    are_equal = True
    for turn in range(experts):
        counts = [0] * ep
        for layer in range(layers):
            for expert in choose_by_turns(k, turn=turn, layer=layer, experts=experts, ep=ep):
                counts[expert // of_rank] += 1
        are_equal &= len(set(counts)) == 1
    assert are_equal == (k * layers % ep == 0)


def test_turns_of_figure_5() -> None:
    for turn, wanted in ((0, [0, 1, 2, 0]), (1, [1, 2, 0, 1])):
        chosen = [choose_by_turns(1, turn=turn, layer=layer, experts=3, ep=3)[0] for layer in range(4)]
        assert chosen == wanted


MODEL = {f"layers.{n}.moe.experts.{e}.w1": (2, 2) for n in range(2) for e in range(4)} | {"layers.0.attn.w": (2, 2)}


def test_experts_of_other_turns_are_left_out() -> None:
    unsaved = PartialExperts(3).find_unsaved(MODEL, turn=1, ep=2)
    kept = {n: choose_by_turns(3, turn=1, layer=n, experts=4, ep=2) for n in range(2)}
    assert unsaved == {f"layers.{n}.moe.experts.{e}.w1" for n in range(2) for e in range(4) if e not in kept[n]}


def test_experts_with_most_tokens_are_saved_the_lower_number_first() -> None:
    tokens = {"layers.0.moe": [1, 5, 5, 0], "layers.1.moe": [0, 0, 0, 9]}
    unsaved = PartialExperts(1, select="load", tokens=tokens).find_unsaved(MODEL, turn=0, ep=1)
    assert MODEL.keys() - unsaved == {"layers.0.attn.w", "layers.0.moe.experts.1.w1", "layers.1.moe.experts.3.w1"}


def test_plans_that_do_not_fit_are_refused() -> None:
    tokens = {"layers.0.moe": [1.0, 1.0]}
    for make in (
        lambda: PartialExperts(0),
        lambda: PartialExperts(1, select="load"),
        lambda: PartialExperts(1, tokens=tokens),
        lambda: PartialExperts(1).find_unsaved({"w": (2, 2)}, turn=0, ep=1),
        lambda: PartialExperts(1).find_unsaved(MODEL, turn=0, ep=3),
        lambda: PartialExperts(1, select="load", tokens=tokens).find_unsaved(MODEL, turn=0, ep=1),
    ):
        with pytest.raises(UsageError):
            make()
    with pytest.raises(UnsupportedError):
        PartialExperts(1).find_unsaved({"layers.0.moe.experts.w1": (4, 2, 2)}, turn=0, ep=1)


@given(SIZES, st.floats(0, 0.05), st.floats(0.0001, 0.2), st.lists(st.integers(0, 40), max_size=12))
def test_losses_stay_within_the_limit_under_dynamic_k(
    sizes: tuple[int, int, int, int], limit: float, interval: float, saves_between_faults: list[int]
) -> None:
    """A recovery makes the experts that it restores the newest there are: their ages begin anew."""
    ep, of_rank, k, _ = sizes
    experts, lost, turn = ep * of_rank, 0.0, 0
    plan = PartialExperts(k).raise_k(experts, lost=0.0, interval=interval, limit=limit)
    for saves in saves_between_faults:
        ages = [0] * experts
        for _ in range(saves):
            saved = choose_by_turns(min(plan.k, experts), turn=turn, layer=0, experts=experts, ep=ep)
            ages = [0 if expert in saved else age + 1 for expert, age in enumerate(ages)]
            turn += 1
        lost += sum(ages) / experts * interval
        assert lost <= limit + 1e-9
        raised = plan.raise_k(experts, lost=lost, interval=interval, limit=limit)
        assert raised.k in (experts, *(min(plan.k, experts) * 2**power for power in range(8)))
        plan = raised


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_experts_that_were_written_longest_ago_are_written(of_turn: int, turns: int, data: st.DataObject) -> None:
    experts, written = of_turn * turns, data.draw(st.integers(1, of_turn))
    shapes = {f"layers.0.moe.experts.{expert}.w1": (2, 2) for expert in range(experts)}
    plan, last = PartialExperts(of_turn, written=written), dict[str, int]()
    most = turns * -(-of_turn // written)
    for turn in range(3 * most):
        kept = shapes.keys() - plan.find_unsaved(shapes, turn=turn, ep=1)
        saved = shapes.keys() - plan.find_unsaved(shapes, turn=turn, ep=1, last=last)
        assert saved <= kept
        assert len(saved) == written
        last |= dict.fromkeys(saved, turn)
        if turn >= most - 1:
            assert len(last) == experts
            assert max(turn - step for step in last.values()) < most
