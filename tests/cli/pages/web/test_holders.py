"""Who holds what, as a page shows it, is what `locate_shard` and `place` say of every rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from ucp_patterns.chunk import Chunk
from ucp_patterns.partition import Partition
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard

import ucp
from ucp.core.layout import AxisLayout, Layout, locate_shard, place
from ucp_cli.pages.web.holders import UNKNOWN, HolderTable

FIXTURES = Path(__file__).parents[4] / "fixtures"
CHECKPOINTS = (
    "deepspeed/z3-dp4-bf16", "deepspeed/z1-tp2-dp2", "deepspeed/z1-pp2-ep2-dp2", "deepspeed/z2-dp2-muon",
    "megatron/gpt-tp2-pp2-dp2-full", "megatron/mixtral-tp2-ep2-etp1-torch-zero",
    "megatron/llama-pp2-vpp2-dp2-torch-zero", "torch/fsdp2-dp2-tp2", "torch/fsdp1-local-dp4",
)  # fmt: skip


def held_of(profile: dict) -> dict[int, int]:
    return {first + step: numel for first, count, numel in profile["runs"] for step in range(count)}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_rank_holds_what_its_layout_says(name: str) -> None:
    folder = FIXTURES / name
    index = ucp.inspect(folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder)
    table = HolderTable()
    checked = 0
    for atom in index.atoms.values():
        for _, _, layout in atom.layouts() if not atom.made_of else ():
            number = table.add(layout, atom.global_shape)
            if number == UNKNOWN:
                assert not layout.all_axes
                continue
            profile = table.profiles[number]
            ranks = list(layout.ranks())
            shards = [locate_shard(layout, atom.global_shape, coords=coords) for coords in ranks]
            assert held_of(profile) == {rank: shard.numel for rank, shard in enumerate(shards) if shard.numel}
            drawn = {(*map(tuple, box[:2]), rank) for box in profile["boxes"] for rank in held_of(runs_of(box))}
            assert drawn == {
                (placed.box.offsets, placed.box.sizes, rank)
                for rank, coords in enumerate(ranks)
                for placed in place(layout, atom.global_shape, coords=coords)
                if placed.box.numel
            }
            checked += 1
    assert checked


def runs_of(box: list) -> dict:
    return {"runs": [[first, count, 1] for first, count in box[2]]}


def test_neighbours_in_a_buffer_are_found_from_one_another() -> None:
    table = HolderTable()
    for start in (0, 900, 1000, 5000):
        layout = Layout(flat=(AxisLayout("dp", 64, Partition(start=start, share=100)),))
        profile = table.profiles[table.add(layout, (250,))]
        ranks = [locate_shard(layout, (250,), coords={"dp": rank}).numel for rank in range(64)]
        assert held_of(profile) == {rank: numel for rank, numel in enumerate(ranks) if numel}


def test_equal_tensors_share_a_profile() -> None:
    table = HolderTable()
    layouts = [Layout((AxisLayout("tp", 2, Shard(dim=0), known),)) for known in ("a", "a")]
    assert {table.add(layout, (4, 4)) for layout in layouts} == {0}
    assert table.add(layouts[0], (8, 4)) == 1
    assert table.add(Layout(), (8, 4)) == UNKNOWN


def test_a_mesh_of_many_ranks_is_drawn_over_its_outer_axes() -> None:
    table = HolderTable()
    layout = Layout((AxisLayout("tp", 8, Shard(dim=0)),), (AxisLayout("dp", 128, Chunk(0)),))
    profile = table.profiles[table.add(layout, (1024, 8))]
    assert profile["runs"] == [[0, 1024, 8]]
    assert (profile["depth"], len(profile["boxes"])) == (1, 8)
    assert profile["boxes"][7] == [[896, 0], [128, 8], [[7, 1]]]
    wide = table.profiles[table.add(Layout(flat=(AxisLayout("dp", 1024, Chunk(0)),)), (1024,))]
    assert Counter(len(box[2]) for box in wide["boxes"]) == {1: 256}
    assert "depth" not in wide


def test_copies_are_one_box() -> None:
    table = HolderTable()
    layout = Layout((AxisLayout("dp", 4, Replicate()), AxisLayout("tp", 2, Shard(dim=1))))
    profile = table.profiles[table.add(layout, (4, 4))]
    assert profile["boxes"] == [
        [[0, 0], [4, 2], [[0, 1], [2, 1], [4, 1], [6, 1]]],
        [[0, 2], [4, 2], [[1, 1], [3, 1], [5, 1], [7, 1]]],
    ]


def test_a_layout_that_does_not_fit_is_not_drawn() -> None:
    table = HolderTable()
    layout = Layout(flat=(AxisLayout("dp", 2, Partition(start=160, share=120)),))
    assert table.add(layout, (120,)) == UNKNOWN
    assert (table.profiles, table.meshes) == ([], [])


def test_too_many_shards_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucp_cli.pages.web.holders._MOST_SHARDS", 10)
    table = HolderTable()
    shapes = [(64,), (128,), (256,)]
    numbers = [table.add(Layout((AxisLayout("dp", 8, Shard(dim=0)),)), shape) for shape in shapes]
    assert numbers == [0, 1, UNKNOWN]
    assert table.is_cut_short


def test_boxes_past_the_limit_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucp_cli.pages.web.holders._MOST_PLACED", 8)
    table = HolderTable()
    for shape in ((64,), (128,)):
        table.add(Layout((AxisLayout("dp", 8, Shard(dim=0)),)), shape)
    assert ["boxes" in profile for profile in table.profiles] == [True, False]
