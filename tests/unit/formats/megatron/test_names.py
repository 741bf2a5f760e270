"""Names in a checkpoint folder of Megatron."""

import pytest
from ucp_formats.megatron.names import (
    GridPlace,
    is_side_file,
    parse_iteration,
    parse_rank_folder,
    rank_folder_name,
)


@pytest.mark.parametrize(
    ("name", "tp", "numbers"),
    [
        ("mp_rank_00", 0, ()),
        ("mp_rank_07", 7, ()),
        ("mp_rank_103", 103, ()),
        ("mp_rank_01_002", 1, (2,)),
        ("mp_rank_01_002_003", 1, (2, 3)),
        ("mp_rank_01_1002_003", 1, (1002, 3)),
    ],
)
def test_folders_of_ranks(name: str, tp: int, numbers: tuple[int, ...]) -> None:
    found = parse_rank_folder(name)
    assert (found.name, found.tp, found.numbers) == (name, tp, numbers)


@pytest.mark.parametrize(
    "name",
    ["mp_rank_0", "mp_rank_00_01", "mp_rank_", "mp_rank_00_000_000_000", "xmp_rank_00", "mp_rank_00_model_states.pt"],
)
def test_what_is_no_folder_of_a_rank(name: str) -> None:
    assert parse_rank_folder(name) is None


def test_one_number_is_a_stage_or_an_expert_rank() -> None:
    folder = parse_rank_folder("mp_rank_01_002")
    assert folder.place(pipelined=True) == GridPlace(tp=1, pp=2, ep=0)
    assert folder.place(pipelined=False) == GridPlace(tp=1, pp=0, ep=2)


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("experts", [True, False])
def test_a_name_is_read_back(pipelined: bool, experts: bool) -> None:
    place = GridPlace(tp=12, pp=3 if pipelined else 0, ep=4 if experts else 0)
    name = rank_folder_name(place, pipelined=pipelined, experts=experts)
    assert parse_rank_folder(name).place(pipelined=pipelined) == place


@pytest.mark.parametrize(
    ("name", "iteration"),
    [
        ("iter_0000001", 1),
        ("iter_12345678", 12345678),
        ("release", 0),
        ("iter_123", None),
        ("iter_", None),
        ("x", None),
    ],
)
def test_iterations(name: str, iteration: int | None) -> None:
    assert parse_iteration(name) == iteration


def test_side_files() -> None:
    assert is_side_file("layer_wise_optimizer_0.pt")
    assert is_side_file("train_dataloader_dprank000.pt")
    assert not is_side_file("model_optim_rng.pt")
    assert not is_side_file("distrib_optim.pt")
