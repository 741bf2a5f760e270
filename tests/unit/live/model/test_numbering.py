"""Numbers of layers and experts in the whole model, from what ranks have in their names."""

from __future__ import annotations

import pytest

from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import LoadError, UsageError
from ucp.live.adapters import LiveModel
from ucp.live.model.parallel.experts import ExpertMap, PlacementLike
from ucp.live.model.parallel.numbering import name_globally, survey_numbers
from ucp.live.parts import LivePart, LiveTensor
from ucp.live.run.mesh import RunMesh


def model(*names: str, chunks: int = 1, said: dict[str, int] | None = None) -> LiveModel:
    tensors = tuple(LiveTensor(names=(name,), dtype=DType.FLOAT32, part=LivePart.full((1,))) for name in names)
    return LiveModel(tensors=tensors, handles={}, owners={}, chunks=chunks, layer_numbers=said or {})


def named(
    models: list[LiveModel],
    topology: str,
    *,
    stored: tuple[str, ...] = (),
    experts: PlacementLike | None = None,
    rename=None,
) -> list[list[str]]:
    """Names in the whole model, per rank."""
    run = Topology.parse(topology)
    told = [survey_numbers(own) for own in models]
    found = []
    for rank, own in enumerate(models):
        mesh = RunMesh.from_topology(run, rank=rank)
        dealt = ExpertMap.parse(experts, ep=run.ep)
        whole = name_globally(own, told, mesh=mesh, rank=rank, experts=dealt, stored=stored, rename=rename)
        found.append([tensor.global_names[0] for tensor in whole.tensors])
    return found


def layers(*numbers: int) -> tuple[str, ...]:
    return tuple(f"layers.{number}.w" for number in numbers)


def test_a_layer_that_says_its_number_goes_before_its_name():
    said = [{"layers.0": 1, "layers.1": 2}, {"layers.0": 3}]
    stages = [model(*layers(0, 1), said=said[0]), model(*layers(0), said=said[1])]
    assert named(stages, "pp=2") == [[*layers(0, 1)], [*layers(2)]]


def test_chunks_that_say_numbers_need_not_interleave():
    said = [{"0.layers.0": 1, "1.layers.0": 4}, {"0.layers.0": 2, "1.layers.0": 3}]
    stages = [model("0.layers.0.w", "1.layers.0.w", chunks=2, said=own) for own in said]
    assert named(stages, "pp=2,vpp=2") == [[*layers(0, 3)], [*layers(1, 2)]]


def test_layers_that_all_stages_hold_are_no_stages_own():
    """Numbered modules that are tied on both stages, and say so by their numbers."""
    said = {"embed.0": 1, "embed.1": 2}
    stages = [
        model("embed.0.w", "embed.1.w", *layers(0), said=said),
        model(*layers(0), "embed.0.w", "embed.1.w", said=said),
    ]
    found = named(stages, "pp=2", stored=("embed.0.w", "embed.1.w", *layers(0, 1)))
    assert found == [["embed.0.w", "embed.1.w", *layers(0)], [*layers(1), "embed.0.w", "embed.1.w"]]


@pytest.mark.parametrize("topology", ["pp=2", "pp=3"])
def test_a_checkpoint_of_as_many_layers_as_each_stage_is_refused(topology):
    """Each from 0: the model has more layers than the checkpoint, which must not be loaded once for each stage."""
    stages = [model(*layers(0, 1)) for _ in range(int(topology[-1]))]
    with pytest.raises(LoadError, match=r"stage 0 0, 1, stage 1 0, 1.*has 2"):
        named(stages, topology, stored=layers(0, 1))


def test_a_checkpoint_of_as_many_experts_as_each_rank_is_refused():
    ranks = [model(*experts(0, 1)), model(*experts(0, 1))]
    with pytest.raises(LoadError, match=r"ep rank 0 0, 1, ep rank 1 0, 1; .*has 2"):
        named(ranks, "dp=2,ep=2", stored=experts(0, 1))
    both = [[*experts(0, 1)]] * 2
    assert named(ranks, "dp=2,ep=2", stored=experts(0, 1), experts={0: [0, 1], 1: [0, 1]}) == both


def test_what_only_one_stage_has_keeps_its_numbers():
    stages = [model(*layers(0)), model(*layers(0), "mtp.layers.0.w")]
    assert named(stages, "pp=2")[1] == [*layers(1), "mtp.layers.0.w"]


def test_names_are_counted_as_the_checkpoint_calls_them():
    stages = [model(*layers(0)), model(*layers(0))]
    stored = ("model.layers.0.w", "model.layers.1.w", "model.layers.2.w")
    with pytest.raises(LoadError, match=r"layers.N: stage 0 0, stage 1 0; .*has 3"):
        named(stages, "pp=2", stored=stored, rename=lambda name: f"model.{name}")


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (((0, 1), (1, 2)), r"stage 0 0, 1, stage 1 1, 2; .*has none"),
        (((0, 1, 2), (4,)), r"stage 0 0..2, stage 1 4;"),
    ],
)
def test_numbers_that_make_no_row_are_refused(numbers, said):
    with pytest.raises(LoadError, match=said) as raised:
        named([model(*layers(*own)) for own in numbers], "pp=2")
    assert "Set layer_number on" in str(raised.value)


def test_numbers_from_modules_must_make_a_row():
    stages = [model(*layers(0), said={"layers.0": 1}), model(*layers(0), said={"layers.0": 3})]
    with pytest.raises(LoadError, match=r"stage 0 0, stage 1 2;"):
        named(stages, "pp=2")


def test_ranks_of_one_stage_must_agree():
    with pytest.raises(LoadError, match=r"rank 1 has 0, .* pp=0 has 0, 1"):
        named([model(*layers(0, 1)), model(*layers(0)), model(*layers(0)), model(*layers(0))], "dp=2,pp=2")


def experts(*numbers: int, layer: int = 0) -> tuple[str, ...]:
    return tuple(f"layers.{layer}.experts.{number}.w" for number in numbers)


def test_experts_of_a_grouped_layer():
    """Transformer Engine: the number is at the end."""
    name = "layers.0.mlp.experts.linear_fc1.weight"
    assert named([model(f"{name}0"), model(f"{name}0")], "dp=2,ep=2") == [[f"{name}0"], [f"{name}1"]]


def test_experts_by_a_map_with_replicas():
    """Expert 0 on both ranks, and twice on the second; a rank has them in the order of the map."""
    dealt = {2: 0, 0: [0, 1, 1], 1: 1}
    found = named([model(*experts(0, 1)), model(*experts(0, 1, 2))], "dp=2,ep=2", experts=dealt)
    assert found == [[*experts(2, 0)], [*experts(0, 0, 1)]]


def test_experts_by_a_map_that_are_numbered_through():
    found = named([model(*experts(1, 3)), model(*experts(0, 2))], "dp=2,ep=2", experts={0: 1, 1: 0, 2: 1, 3: 0})
    assert found == [[*experts(1, 3)], [*experts(0, 2)]]


def test_experts_by_layer():
    names = (*experts(0), *experts(0, layer=1))
    found = named([model(*names), model(*names)], "dp=2,ep=2", experts={0: {0: 0, 1: 1}, 1: {0: 1, 1: 0}})
    assert found == [[*experts(0), *experts(1, layer=1)], [*experts(1), *experts(0, layer=1)]]


def test_experts_that_make_no_row_are_refused():
    with pytest.raises(LoadError, match=r"ep rank 0 0, 1, ep rank 1 3;") as raised:
        named([model(*experts(0, 1)), model(*experts(3))], "dp=2,ep=2")
    assert "pass placement={expert: ranks}" in str(raised.value)
    with pytest.raises(LoadError, match=r"ep rank 0 0, ep rank 1 0, 1; placement= .*0, 1 .*rank 0"):
        named([model(*experts(0)), model(*experts(0, 1))], "dp=2,ep=2", experts={0: 0, 1: 0, 2: 1, 3: 1})


@pytest.mark.parametrize(
    ("dealt", "said"),
    [
        ({0: 2}, r"from 0 to 1 \(ep=2 in the topology\); got 0: 2"),
        ({"a": 0}, "got 'a': 0"),
        ({0: []}, r"got 0: \[\]"),
        ({0: "01"}, "got 0: '01'"),
        ([0, 1], r"expert: ranks}}; got \[0, 1\]"),
        ({0: {0: 0}, 1: 1}, "got both"),
        ({0: {0: 7}}, "got layer 0: 0: 7"),
    ],
)
def test_maps_that_are_none(dealt, said):
    with pytest.raises(UsageError, match=said):
        ExpertMap.parse(dealt, ep=2)


def test_chunks_are_those_of_the_topology():
    two = model("0.layers.0.w", "1.layers.0.w", chunks=2)
    with pytest.raises(UsageError, match=r"pp above 1 .*; got 2 .*dp=2"):
        named([two, two], "dp=2")
    with pytest.raises(UsageError, match=r"expected 3 modules, as vpp=3 says; got 2"):
        named([two, two], "pp=2,vpp=3")
