"""Models of no family: what the message says, and that what it says to do works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.formats.megatron.write.test_foreign_sources import SAID, fuse_qkv, huggingface
from tests.unit.formats.megatron.write.test_torch_dist import tensors
from ucp.api import convert
from ucp.core.index import ParamGroup
from ucp.errors import MisfitError
from ucp.testing.handmade import Shards, make_index, write_checkpoint

OTHER = (("model.", "net."), ("self_attn.", "att."), ("embed_tokens", "emb"), ("layernorm", "scale"))
RULES = """
name = "mine"
title = "Llama under names of our own"
extends = ["llama"]

[alias.huggingface]
"embedding.word_embeddings.weight" = "net.emb.weight"
"decoder.layers.{layer}.input_layernorm.weight" = "net.layers.{layer}.input_scale.weight"
"decoder.layers.{layer}.self_attention.linear_proj.weight" = "net.layers.{layer}.att.o_proj.weight"
"decoder.layers.{layer}.pre_mlp_layernorm.weight" = "net.layers.{layer}.post_attention_scale.weight"
"decoder.layers.{layer}.mlp.linear_fc2.weight" = "net.layers.{layer}.mlp.down_proj.weight"
"decoder.final_layernorm.weight" = "net.norm.weight"

[alias.huggingface."decoder.layers.{layer}.self_attention.linear_qkv.weight"]
names = [
    "net.layers.{layer}.att.q_proj.weight",
    "net.layers.{layer}.att.k_proj.weight",
    "net.layers.{layer}.att.v_proj.weight",
]
groups = "groups"

[alias.huggingface."decoder.layers.{layer}.mlp.linear_fc1.weight"]
names = ["net.layers.{layer}.mlp.gate_proj.weight", "net.layers.{layer}.mlp.up_proj.weight"]
"""


def written(folder: Path, model: dict[str, torch.Tensor]) -> Path:
    shards = Shards(folder)
    states = {(name, "weight"): shards.whole(value.numpy()) for name, value in model.items()}
    groups = [ParamGroup(params=tuple(model), hyper={"lr": 0.1})]
    write_checkpoint(make_index(folder, states, groups=groups))
    return folder


def to_megatron(src: Path, dst: Path, **options: str) -> None:
    said = {"transformer_impl": "local", **{key: str(value) for key, value in SAID.items()}}
    convert(src, dst, to="megatron", topology="tp=1", settings=said, workers=1, **options)


def renamed(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for known, own in OTHER:
        model = {name.replace(known, own): value for name, value in model.items()}
    return model


def test_a_model_of_no_family_is_told_what_megatron_needs(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {f"blocks.{n}.weight": torch.ones(2, 2) for n in range(12)})
    with pytest.raises(MisfitError) as error:
        to_megatron(source, tmp_path / "b")
    text = str(error.value)
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in text
    assert f"12 of the 12 names in {source}" in text
    assert "\n  blocks.0.weight\n" in text
    assert "\n  (+4 more)\n" in text
    assert "gpt, gpt-neox, llama, mcore-gpt, mcore-hybrid, mixtral, qwen2" in text
    assert "mcore-frame" not in text  # a part of families, not one
    assert "--patterns my.toml; --family chooses" in text
    assert not (tmp_path / "b").exists()


def test_only_names_that_the_nearest_family_lacks_are_listed(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {**huggingface(), "adapter.weight": torch.ones(3)})
    with pytest.raises(MisfitError, match=r"1 of the 22 names .*\n  adapter\.weight\n"):
        to_megatron(source, tmp_path / "b")


def test_what_the_message_says_to_do_works(tmp_path: Path) -> None:
    model = huggingface()
    source = written(tmp_path / "source", renamed(model))
    with pytest.raises(MisfitError, match="20 of the 21 names"):
        to_megatron(source, tmp_path / "b")
    (tmp_path / "my.toml").write_text(RULES)
    to_megatron(source, tmp_path / "b", patterns=str(tmp_path / "my.toml"))
    found = tensors(tmp_path / "b" / "iter_0000007")
    qkv = torch.stack([fuse_qkv(model, layer) for layer in range(2)])
    assert torch.equal(found["decoder.layers.self_attention.linear_qkv.weight"], qkv)
