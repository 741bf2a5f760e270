"""The grid of ranks that save, against a simulation of the ranks themselves."""

import pytest
from ucp_formats.megatron.arguments import Arguments
from ucp_formats.megatron.legacy.files import Grid
from ucp_formats.megatron.names import parse_rank_folder


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
