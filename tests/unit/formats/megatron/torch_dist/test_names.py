"""Canonical names of keys, and orders of registration."""

import pytest
from ucp_formats.megatron.torch_dist import keys

from ucp.contract.protocols import SourceOptions
from ucp.errors import FamilyError

KEYS = {
    "embedding.word_embeddings.weight": (16, 8),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 8),
    "decoder.layers.self_attention.linear_qkv.weight": (2, 16, 8),
    "decoder.layers.self_attention.linear_proj.weight": (2, 8, 8),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 8),
    "decoder.layers.mlp.linear_fc1.weight": (2, 24, 8),
    "decoder.layers.mlp.linear_fc2.weight": (2, 8, 12),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (16, 8),
}


def names_of(shapes, arguments, **options):
    return keys.name_tensors(shapes, arguments, SourceOptions(**options))


LLAMA = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False}


def test_a_model_of_no_family_keeps_its_names():
    names = names_of({"blocks.weight": (3,)}, {})
    assert names.family is None
    assert names.template("decoder.layers.mlp.x.weight") == "decoder.layers.{layer}.mlp.x.weight"
    assert names.registration_orders(["b", "a"]) == []
    assert names.sort(["b", "a"]) == ["b", "a"]
    assert "names are those of the file" in names.notes[0]
    assert names.is_buffer("mlp.router.expert_bias")
    assert not names.is_buffer("blocks.weight")


def test_fused_norms_are_registered_with_the_module_that_follows():
    names = names_of(KEYS, LLAMA)
    layer = ["input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "pre_mlp_layernorm"]
    all_names = [f"decoder.layers.{number}.{own}.weight" for number in (0, 1) for own in layer]
    local, attention, fused = names.registration_orders(all_names)
    assert local == all_names
    assert attention == fused
    assert [name.split(".", 3)[3] for name in attention[:4]] == [
        f"{own}.weight" for own in (layer[1], layer[0], layer[2], layer[3])
    ]


def test_names_without_a_rule_keep_their_keys_unless_the_user_names_the_family():
    keys = {**KEYS, "adapter.weight": (3, 3), "vision.weight": (3,)}
    names = names_of(keys, LLAMA)
    assert names.template("adapter.weight") == "adapter.weight"
    assert names.family is None
    with pytest.raises(FamilyError, match=r"(?s)2 names .*'llama'.*adapter.*vision"):
        names_of(keys, LLAMA, family="llama")
    assert names_of(KEYS, LLAMA, family="llama").family is not None
