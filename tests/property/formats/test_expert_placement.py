"""Experts by rank -> DeepSpeed's descriptor -> affine map -> experts by rank; and records that contradict others."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json
from ucp_formats.deepspeed.placement import divide_evenly, read_affine_map, read_experts_by_rank, write_affine_map
from ucp_patterns.pieces import Indexes

from ucp.core.topology import ExpertsByRank
from ucp.errors import MalformedError
from ucp.placement.descriptor import ExpertPlacement


@st.composite
def held_by_rank(draw: st.DrawFn) -> ExpertsByRank:
    """Every expert on one rank or more, at most once on each, in any order; ranks may be empty."""
    count, ep = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    ranks: list[list[int]] = [[] for _ in range(ep)]
    for expert in range(count):
        for rank in draw(st.sets(st.integers(0, ep - 1), min_size=1)):
            ranks[rank].append(expert)
    if draw(st.booleans()):  # in order, so that some follow one another
        return tuple(map(tuple, ranks))
    return tuple(tuple(draw(st.permutations(experts))) for experts in ranks)


def layer_of(held: ExpertsByRank, names: list[str], shape: tuple[int, ...]) -> dict[str, object]:
    count = 1 + max(chain(*held))
    return {
        "ep_rank": 0,
        "num_local_experts": len(held[0]),
        "expert_placement": ExpertPlacement.of(held, num_experts=count).to_document(),
        "affine_maps": {"version": 1, "params": {name: write_affine_map(held, shape) for name in names}},
    }


@given(held_by_rank(), st.lists(st.integers(1, 3), max_size=2))
def test_slots_descriptor_map_slots(held: ExpertsByRank, rest: list[int]) -> None:
    count = 1 + max(chain(*held))
    record = ExpertPlacement.of(held, num_experts=count)
    assert record.problem == ""
    assert json.decode(json.encode(record.to_document()), type=ExpertPlacement).experts_by_rank == held
    shape = (count, *rest)
    saved = write_affine_map(record.experts_by_rank, shape)
    assert read_affine_map(saved, "x") == held
    layer = layer_of(held, ["w"], shape)
    assert read_experts_by_rank(layer, ["w"], count, len(held), "x") == held
    assert read_experts_by_rank({"affine_maps": layer["affine_maps"]}, ["w"], count, len(held), "x") == held


@given(held_by_rank(), st.lists(st.integers(1, 3), max_size=2))
def test_the_pattern_gives_what_the_map_says(held: ExpertsByRank, rest: list[int]) -> None:
    """Both are applied with numpy: pieces as strided views, as DeepSpeed does, and the pattern's boxes."""
    shape = (1 + max(chain(*held)), *rest)
    whole = np.arange(np.prod(shape)).reshape(shape)
    saved = write_affine_map(held, shape)
    for rank, experts in enumerate(held):
        record = saved["ranks"][rank]  # type: ignore[index]
        shard = np.full(record["shard_shape"], -1)
        for piece in record["pieces"]:
            views = [
                np.lib.stride_tricks.as_strided(array.reshape(-1)[offset:], piece["shape"], [8 * n for n in strides])
                for array, (offset, strides) in ((whole, piece["source"]), (shard, piece["dest"]))
            ]
            views[1][...] = views[0]
            assert piece["locations"] == [
                r for r, own in enumerate(held) if experts[piece["dest"][0] // max(shard[0].size, 1)] in own
            ]
        boxed = np.full((len(experts), *rest), -1)
        for pair in Indexes(held).regions(shape, len(held), rank):
            there, here = (tuple(map(slice, box.offsets, box.stops)) for box in (pair.global_box, pair.local))
            boxed[here] = whole[there]
        assert np.array_equal(shard, whole[list(experts)])
        assert np.array_equal(boxed, shard)


def broken(change) -> dict[str, object]:
    layer = layer_of(((0, 2), (1, 2, 3)), ["w1", "w2"], (4, 3))
    change(layer)
    return layer


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer["expert_placement"]["ranks"][0].update(experts=[2, 0]),
        lambda layer: layer["expert_placement"]["ranks"][0].update(experts=[0, 0]),
        lambda layer: layer["expert_placement"]["ranks"][1].update(experts=[1, 2]),
        lambda layer: layer["expert_placement"]["ranks"][1].update(experts=[1, 2, 4]),
        lambda layer: layer["expert_placement"]["ranks"][1].update(rank=0),
        lambda layer: layer["expert_placement"]["ranks"].pop(),
        lambda layer: layer["expert_placement"].update(num_experts=3),
        lambda layer: layer["expert_placement"].update(ranks=None),
        lambda layer: layer.update(num_local_experts=3),
        lambda layer: layer.update(ep_rank=1),
        lambda layer: layer["affine_maps"]["params"].pop("w2"),
        lambda layer: layer["affine_maps"]["params"]["w2"].update(logical_shape=[3, 3]),
        lambda layer: layer["affine_maps"]["params"]["w2"]["ranks"][0]["pieces"][0].update(source=[3, [3, 1]]),
        lambda layer: layer["affine_maps"]["params"]["w2"]["ranks"][0]["pieces"][0].update(scale=0.5),
        lambda layer: layer["affine_maps"]["params"].update(w2=write_affine_map(((2, 0), (1, 2, 3)), (4, 3))),
    ],
)
def test_records_that_contradict_each_other_are_refused(change) -> None:
    assert read_experts_by_rank(broken(lambda _: None), ["w1", "w2"], 4, 2, "x") == ((0, 2), (1, 2, 3))
    with pytest.raises(MalformedError):
        read_experts_by_rank(broken(change), ["w1", "w2"], 4, 2, "x")


def test_without_a_record_experts_are_in_order() -> None:
    assert read_experts_by_rank({}, ["w"], 4, 2, "x") == divide_evenly(4, 2) == ((0, 1), (2, 3))
    with pytest.raises(MalformedError):
        read_experts_by_rank({}, ["w"], 3, 2, "x")
