"""How parameters of the kept checkpoints of Megatron lie: declared patterns place what is read, on every axis."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ucp_formats.megatron.source import MegatronFormat

from tests.registry import FIXTURES
from ucp.contract.protocols import SourceOptions
from ucp.core.index import Index
from ucp.core.layout import Layout, place

ROOT = FIXTURES / "megatron"
EMBEDDING = "embedding.word_embeddings.weight"
QKV = "decoder.layers.{}.self_attention.linear_qkv.weight"
EXPERT = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"


@cache
def index_of(case: str) -> Index:
    return MegatronFormat().read(ROOT / case / "checkpoint")


def laid(case: str, name: str) -> dict[str, str]:
    """Axis to pattern; of `unique`, the owner too."""
    axes = index_of(case).atoms[name].layout.all_axes
    return {own.axis: f"{own.pattern.name}{getattr(own.pattern, 'owner', '')}" for own in axes if own.parts > 1}


@pytest.mark.parametrize(
    ("case", "owners"),
    [
        ("llama-pp2-vpp2-dp2-torch-zero", [(0, 0), (1, 0), (0, 1), (1, 1)]),
        ("llama-tp2-pp2-dp2-torch-zero", [(0,), (0,), (1,), (1,)]),
        ("llama-tp2-pp2-dp2-full", [(0,), (0,), (1,), (1,)]),
    ],
)
def test_layers_are_on_the_stages_and_chunks_they_are_dealt_to(case: str, owners: list[tuple[int, ...]]) -> None:
    for layer, wanted in enumerate(owners):
        own = laid(case, QKV.format(layer))
        named = zip(("pp", "vpp"), wanted, strict=False)
        assert {axis: own.get(axis) for axis, _ in named} == {
            axis: f"unique{at}" for axis, at in zip(("pp", "vpp"), wanted, strict=False)
        }


@pytest.mark.parametrize("case", ["gpt-tp2-pp2-torch", "gpt-tp2-pp2-dp2-full"])
def test_a_tied_embedding_is_on_the_first_and_the_last_stage(case: str) -> None:
    assert laid(case, EMBEDDING)["pp"] == "replicate"
    assert laid(case, "embedding.position_embeddings.weight")["pp"] == "unique0"
    assert laid(case, "decoder.final_layernorm.weight")["pp"] == "unique1"


@pytest.mark.parametrize("case", ["mixtral-ep2-dp2-torch", "mixtral-pp2-ep2-dp2-dp", "mixtral-ep4-dp4-full"])
def test_experts_are_on_the_ranks_they_are_dealt_to(case: str) -> None:
    own = index_of(case)
    experts = 1 + max(int(name.split(".local_experts.")[1].split(".")[0]) for name in own.atoms if ".local_" in name)
    for number in range(experts):
        assert laid(case, EXPERT.format(0, number))["ep"] == f"unique{number // (experts // own.topology.ep)}"


def test_the_shares_of_a_bucket() -> None:
    """A bucket of 9,280 elements, stored without its padding to 9,344: each of two ranks has 4,672 of it."""
    case = "llama-tp2-dp2-dp"
    patterns = {laid(case, name)["dp"] for name in index_of(case).atoms}
    assert patterns == {"partition(share=4672)"}
    atom = index_of(case).atoms["output_layer.weight"]
    held = [
        {own.box for tp in range(2) for own in place(atom.layout, atom.global_shape, coords={"dp": dp, "tp": tp})}
        for dp in range(2)
    ]
    assert [sum(box.numel for box in boxes) for boxes in held] == [atom.states["exp_avg"].numel, 0]


@pytest.mark.parametrize(
    ("rule", "shown"),
    [
        ('{ pattern = "shard", dim = 0 }', "shard(dim=0)"),
        ('{ pattern = "replicate" }', "replicate"),
        ('{ pattern = "shard", dim = 1, blocks = ["dim / 2", "dim / 2"] }', "shard(dim=1, blocks=[14, 14])"),
    ],
)
def test_boxes_that_contradict_the_rules_are_in_doubt(tmp_path: Path, rule: str, shown: str) -> None:
    rules = tmp_path / "lie.toml"
    rules.write_text(
        'name = "lie"\nextends = ["llama"]\n[[rule]]\nname = "decoder.layers.{layer}.mlp.linear_fc2.weight"\n'
        f"tp = {rule}\n"
    )
    index = MegatronFormat(SourceOptions(patterns=rules)).read(ROOT / "llama-tp2-dp2-dp" / "checkpoint")
    (doubt,) = index.doubts
    assert doubt.kind == "layout"
    assert f"linear_fc2.weight: [0:20, 0:14] [0:20, 14:28] of [20, 28], but its rule is tp=2 {shown}" in doubt.text
    unstated = {name.rpartition("mlp.")[2] for name, atom in index.atoms.items() if atom.layout == Layout()}
    assert unstated == {"linear_fc2.weight"}
