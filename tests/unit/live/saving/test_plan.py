"""`plan_save`: every item once, by a rank that holds it, evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ucp.core.region import Box
from ucp.saving.plan import SaveItem, plan_save


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
