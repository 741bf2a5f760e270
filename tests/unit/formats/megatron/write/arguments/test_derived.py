from __future__ import annotations

import pytest
from ucp_formats.megatron.write.arguments import derive_arguments, derive_attention

from ucp.core.tensor import DType
from ucp.errors import UsageError
from ucp.io.pickle.values import GlobalName

LAYER = "decoder.layers.{}."


def shapes(**more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (64, 32), "output_layer.weight": (64, 32)}
    for layer in range(2):
        at = LAYER.format(layer)
        found[f"{at}self_attention.linear_qkv.weight"] = (48, 32)
        found[f"{at}self_attention.linear_proj.weight"] = (32, 32)
    return {**found, **more}


def derived(of: dict[str, tuple[int, ...]], *dtypes: DType, **asked: object) -> dict[str, object]:
    return derive_arguments(of, dtypes or (DType.BFLOAT16,), settings=asked, source="a folder")


def test_heads_are_asked_for():
    with pytest.raises(UsageError, match=r"num_attention_heads, .*a folder .*--set num_attention_heads=\.\.\."):
        derived(shapes())
    found = derived(shapes(), num_attention_heads=8)
    assert (found["kv_channels"], found["num_query_groups"], found["group_query_attention"]) == (4, 2, True)


def test_a_norm_of_each_head_tells_how_wide_it_is():
    found = derived(shapes(**{"decoder.layers.0.self_attention.q_layernorm.weight": (8,)}))
    assert (found["num_attention_heads"], found["num_query_groups"], found["qk_layernorm"]) == (4, 1, True)


@pytest.mark.parametrize(
    ("rows", "heads", "wanted"),
    [(96, 4, (8, 4, False)), (40, 4, None), (48, 5, None), (64, 4, (8, 2, True))],
)
def test_rows_that_are_shared_out_otherwise(rows, heads, wanted):
    """40 rows are no whole number of groups; 5 heads do not divide 32 columns."""
    own = {"a.linear_qkv.weight": (rows, 32), "a.linear_proj.weight": (32, 32)}
    found = derive_attention(own, {"num_attention_heads": heads})
    keys = ("kv_channels", "num_query_groups", "group_query_attention")
    assert tuple(found[key] for key in keys) == wanted if wanted else "num_query_groups" not in found


@pytest.mark.parametrize(("wide", "gated"), [(24, True), (12, False)])
def test_feed_forward(wide, gated):
    at = LAYER.format(0)
    own = shapes(**{f"{at}mlp.linear_fc1.weight": (wide, 32), f"{at}mlp.linear_fc2.weight": (32, 12)})
    found = derived(own, num_attention_heads=8)
    assert (found["swiglu"], found["ffn_hidden_size"], found["num_layers"], found["hidden_size"]) == (gated, 12, 2, 32)


def test_experts_in_some_layers():
    dense, sparse = LAYER.format(0), LAYER.format(1)
    own = {f"{dense}mlp.linear_fc1.weight": (24, 32), f"{dense}mlp.linear_fc2.weight": (32, 12)}
    for expert in range(3):
        own[f"{sparse}mlp.experts.local_experts.{expert}.linear_fc1.weight"] = (8, 32)
        own[f"{sparse}mlp.experts.local_experts.{expert}.linear_fc2.weight"] = (32, 4)
    own[f"{sparse}mlp.shared_experts.linear_fc2.weight"] = (32, 10)
    found = derived(shapes(**own), num_attention_heads=8)
    assert (found["num_experts"], found["moe_ffn_hidden_size"], found["ffn_hidden_size"]) == (3, 4, 12)
    assert (found["moe_layer_freq"], found["moe_shared_expert_intermediate_size"]) == ([0, 1], 10)


def test_a_hybrid():
    own = {"decoder.layers.0.mixer.A_log": (4,), "decoder.layers.2.mlp.linear_fc1.weight": (4, 4)}
    own |= {"decoder.layers.1.self_attention.linear_qkv.weight": (4, 4)}
    found = derived({"embedding.word_embeddings.weight": (8, 4), **own}, num_attention_heads=2)
    assert found["hybrid_override_pattern"] == "M*-"


@pytest.mark.parametrize(
    ("dtypes", "name"),
    [((DType.FLOAT32, DType.BFLOAT16), "bfloat16"), ((DType.FLOAT16,), "float16"), ((DType.FLOAT32,), "float32")],
)
def test_precision(dtypes, name):
    found = derived(shapes(), *dtypes, num_attention_heads=8)
    assert found["params_dtype"] == GlobalName("torch", name)
    assert (found["bf16"], found["fp16"]) == (name == "bfloat16", name == "float16")
