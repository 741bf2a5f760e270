"""`plan_save`: every item once, by a rank that holds it, evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ucp.core.region import Box
from ucp.saving.plan import SaveItem, plan_save


def make_item(number: int, nbytes: int) -> SaveItem:
    return SaveItem(param=f"p{number}", state="weight", boxes=(Box((0,), (nbytes,)),), nbytes=nbytes)


@st.composite
def runs(draw: st.DrawFn) -> list[list[SaveItem]]:
    """What some ranks hold; every item is held by one rank at least."""
    ranks = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 100), max_size=20))
    held: list[list[SaveItem]] = [[] for _ in range(ranks)]
    for number, nbytes in enumerate(sizes):
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(make_item(number, nbytes))
    return held


@given(runs())
def test_every_item_is_written_once_by_a_rank_that_holds_it(held: list[list[SaveItem]]) -> None:
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
