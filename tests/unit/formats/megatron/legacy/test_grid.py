"""The grid of ranks that save, against a simulation of the ranks themselves."""

from itertools import product

import pytest
from ucp_formats.megatron.arguments import Arguments
from ucp_formats.megatron.legacy.files import ExpertPart, Grid
from ucp_formats.megatron.names import GridPlace, parse_rank_folder

DEGREES = [
    (tp, ep, etp, dp)
    for tp, ep, etp, dp in product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8))
    if etp <= tp and (tp * dp) % (etp * ep) == 0
]


def test_the_ranks_that_save_are_expected() -> None:
    for degrees in DEGREES:
        check_ranks_that_save(*degrees)


def check_ranks_that_save(tp: int, ep: int, etp: int, dp: int) -> None:
    """parallel_state.py numbers ranks; checkpointing.py lets the first of each data-parallel group save."""
    saved: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in range(tp * dp):
        expert_copy = rank // (etp * ep)
        if rank // tp == 0 or (ep > 1 and expert_copy == 0):
            saved.setdefault((rank % tp, rank // etp % ep), []).append((rank % etp, expert_copy))
    grid = Grid(tp=tp, pp=2, ep=ep, etp=etp)
    assert {(place.tp, place.ep) for place in grid.places() if place.pp == 1} == set(saved)
    if not grid.collides:
        for (own_tp, own_ep), parts in saved.items():
            found = grid.expert_part(GridPlace(tp=own_tp, pp=0, ep=own_ep))
            if ep > 1:
                assert (found.etp, found.copy) == parts[0]


def test_ranks_of_one_name_collide() -> None:
    assert Grid(tp=1, pp=1, ep=2, etp=2).collides
    assert not Grid(tp=2, pp=1, ep=2, etp=2).collides
    assert not Grid(tp=2, pp=1, ep=1, etp=2).collides
    assert Grid(tp=2, pp=1, ep=1, etp=4).collides
    assert not Grid(tp=4, pp=1, ep=1, etp=2).collides


def test_without_experts_nothing_is_cut_over_their_ranks() -> None:
    folders = (parse_rank_folder("mp_rank_00"), parse_rank_folder("mp_rank_01"))
    assert Grid.of(Arguments(raw={}, tp=2, etp=4), folders).etp == 2
    assert Grid.of(Arguments(raw={}, tp=2, etp=4, num_experts=4), folders).etp == 4


def test_without_experts_every_part_is_that_of_the_model() -> None:
    grid = Grid(tp=4, pp=1, ep=1, etp=4)
    assert grid.expert_part(GridPlace(tp=3, pp=0, ep=0)) == ExpertPart(etp=3, copy=0)


@pytest.mark.parametrize(
    ("names", "arguments", "expected"),
    [
        (["mp_rank_00", "mp_rank_01"], {}, Grid(tp=2, pp=1, ep=1, etp=2)),
        (["mp_rank_00_000", "mp_rank_00_001"], {}, Grid(tp=1, pp=2, ep=1, etp=1)),
        (["mp_rank_00_000", "mp_rank_00_001"], {"ep": 2, "pp": 1, "tp": 1}, Grid(tp=1, pp=1, ep=2, etp=1)),
        (["mp_rank_00_000", "mp_rank_00_001"], {"ep": 2}, Grid(tp=1, pp=1, ep=2, etp=1)),
        (["mp_rank_00_000_000", "mp_rank_00_001_001"], {}, Grid(tp=1, pp=2, ep=2, etp=1)),
    ],
)
def test_what_arguments_lack_is_seen_from_the_names(
    names: list[str], arguments: dict[str, int], expected: Grid
) -> None:
    folders = tuple(parse_rank_folder(name) for name in names)
    assert Grid.of(Arguments(raw={}, **arguments), folders) == expected
