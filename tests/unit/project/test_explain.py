from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ucp.checks.explain import explain_index
from ucp.contract.model import run_arguments
from ucp.contract.protocols import SourceOptions
from ucp.core.index import Extra, Index
from ucp.core.topology import Topology
from ucp.io.pickle.values import GlobalName, Stub
from ucp.testing.handmade import Shards, make_index

ARGUMENTS = {"num_layers": 1, "hidden_size": 4, "swiglu": True}


@pytest.fixture
def shards(tmp_path) -> Shards:
    return Shards(tmp_path)


def index_of(shards: Shards, shapes: dict[str, tuple[int, ...]], *extras: Extra, **degrees: int) -> Index:
    states = {(name, "weight"): shards.whole(np.zeros(shape, np.float32)) for name, shape in shapes.items()}
    return replace(make_index(shards.folder, states, extras=extras), topology=Topology(**degrees))


def namespace(values: dict[str, object]) -> Stub:
    return Stub(GlobalName("argparse", "Namespace"), state=values, has_state=True)


@pytest.mark.parametrize("value", [ARGUMENTS, namespace(ARGUMENTS)])
@pytest.mark.parametrize("name", ["args", "client_state/args"])
def test_recorded_arguments_are_found(shards, name, value):
    assert run_arguments(index_of(shards, {}, Extra(name=name, value=value))) == ARGUMENTS


@pytest.mark.parametrize(
    "extra", [Extra(name="other", value=ARGUMENTS), Extra(name="args", value=3), Extra(name="args", value={}, rank=1)]
)
def test_where_there_are_none_there_are_none(shards, extra):
    assert run_arguments(index_of(shards, {}, extra)) == {}


def test_patterns_are_those_of_the_degrees_of_the_checkpoint(shards):
    shapes = {
        "embedding.word_embeddings.weight": (8, 4),
        "decoder.layers.0.self_attention.linear_qkv.weight": (8, 4),
        "decoder.layers.0.mlp.linear_fc1.weight": (12, 4),
        "decoder.layers.0.mlp.linear_fc2.weight": (4, 6),
    }
    report = explain_index(index_of(shards, shapes, Extra(name="args", value=ARGUMENTS), tp=2))
    found = {own.name.split(".", 3)[-1]: own for own in report.parameters}
    assert report.ok
    assert found["mlp.linear_fc1.weight"].patterns == ("tp: shard(dim=0, blocks=[6, 6])",)
    assert "decoder.layers.{layer}.input_layernorm.weight" in {str(rule.name) for rule in report.unused}
    assert all(rule.when is None or str(rule.when) == "gated" for rule in report.unused)


def test_keys_that_count_layers_are_explained_by_their_rule(shards):
    shapes = {"decoder.layers.mlp.linear_fc2.weight": (3, 4, 6)}
    (own,) = explain_index(index_of(shards, shapes), SourceOptions(family="llama")).parameters
    assert (own.canonical, own.style) == ("decoder.layers.{layer}.mlp.linear_fc2.weight", "torch_dist")
    assert own.patterns == ("tp: shard(dim=1)",)
    assert not own.problem


def test_what_is_no_parameter_is_left_out(shards):
    shapes = {"decoder.final_layernorm.weight": (4,), "decoder.layers.0.mlp.linear_fc1._extra_state": (1,)}
    report = explain_index(index_of(shards, shapes), SourceOptions(family="llama"))
    assert [own.name for own in report.parameters] == ["decoder.final_layernorm.weight"]


def test_a_name_of_several_parameters_is_a_problem(shards):
    report = explain_index(
        index_of(shards, {"backbone.layers.0.norm.weight": (4,)}), SourceOptions(family="mcore-hybrid")
    )
    assert "can be" in report.parameters[0].problem
    assert not report.ok
