"""What a config.json is derived from: arguments that megatron-core's own runs recorded, by the rules of families."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from ucp_formats.huggingface.config import derive_config

from ucp.contract.model import run_arguments
from ucp.contract.registry import choose_family, families, family, recognise
from ucp.errors import MisfitError

MEGATRON = Path(__file__).parents[3] / "fixtures" / "megatron"

LLAMA = {
    "hidden_act": "silu",
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


def config_of(case: str, **changed: object) -> Mapping[str, object]:
    """The configuration derived from a kept checkpoint, of whose arguments some are other ones, or None: not there."""
    format_, evidence = recognise(MEGATRON / case / "checkpoint")
    index = format_.read(evidence.root)
    shapes = {name: own.global_shape for name, own in index.atoms.items()}
    arguments = {**run_arguments(index), **changed}
    arguments = {name: own for name, own in arguments.items() if own is not ...}
    found, _ = choose_family(names=shapes, shapes=shapes, arguments=arguments)
    return derive_config(found, shapes, arguments, str(evidence.root)).values


def test_llama() -> None:
    found = config_of("llama-tp2-pp2-dp2-full")
    assert found["architectures"] == ["LlamaForCausalLM"]
    assert found | LLAMA == found


def test_llama_with_scaled_positions() -> None:
    found = config_of("llama-tp2-pp2-dp2-full", use_rope_scaling=True, rope_scaling_factor=32.0, rotary_base=500000)
    assert found["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_mixtral() -> None:
    found = config_of("mixtral-ep4-dp4-full")
    assert found["model_type"] == "mixtral"
    assert (found["intermediate_size"], found["num_local_experts"], found["num_experts_per_tok"]) == (12, 4, 2)


def test_gpt_2() -> None:
    found = config_of("gpt-tp2-pp2-dp2-full")
    assert found["tie_word_embeddings"] is True
    assert (found["n_embd"], found["n_layer"], found["n_head"], found["n_positions"]) == (20, 4, 4, 16)
    assert found["activation_function"] == "gelu"
    assert config_of("gpt-tp2-pp2-dp2-full", bias_gelu_fusion=True)["activation_function"] == "gelu_new"


def test_deepseek_v3() -> None:
    found = config_of("deepseek-tp2-ep2-dp2-full")
    assert found["model_type"] == "deepseek_v3"
    assert found["topk_method"] == "noaux_tc"
    assert (found["n_shared_experts"], found["first_k_dense_replace"], found["kv_lora_rank"]) == (2, 1, 8)


@pytest.mark.parametrize(
    ("case", "changed", "told"),
    [
        ("llama-tp2-dp2-dp", {"rotary_base": ...}, "rope_parameters.rope_theta: rotary_base "),
        ("llama-tp2-dp2-dp", {"norm_epsilon": ...}, "rms_norm_eps: norm_epsilon "),
        ("llama-tp2-dp2-dp", {"rotary_percent": 0.5}, "rotary_percent == 1: rotary_percent = 0.5"),
        ("llama-tp2-dp2-dp", {"rotary_interleaved": True}, "not rotary_interleaved: rotary_interleaved = True"),
        ("llama-tp2-dp2-dp", {"apply_layernorm_1p": True}, "apply_layernorm_1p = True"),
        ("llama-tp2-dp2-dp", {"window_size": [128, 0]}, r"window_size = \[128, 0\]"),
        ("llama-tp2-dp2-dp", {"swiglu": ...}, "swiglu is"),
        (
            "gpt-dp4-dp",
            {"openai_gelu": ..., "bias_gelu_fusion": ...},
            "activation_function: bias_gelu_fusion, openai_gelu",
        ),
        ("gpt-dp4-dp", {"squared_relu": True}, "squared_relu = True"),
        ("mixtral-ep4-dp4-full", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax = True"),
        ("mixtral-ep4-dp4-full", {"moe_router_topk": ...}, "num_experts_per_tok: moe_router_topk "),
        ("deepseek-tp2-ep2-dp2-full", {"rope_type": "yarn", "rotary_scaling_factor": 40.0}, "rope_type = 'yarn'"),
        (
            "deepseek-tp2-ep2-dp2-full",
            {"moe_router_num_groups": 2, "moe_router_group_topk": 2},
            "// moe_router_group_topk",
        ),
        ("deepseek-tp2-ep2-dp2-full", {"norm_epsilon": 1e-5}, "norm_epsilon == 1e-06: norm_epsilon = 1e-05"),
        ("mamba-tp2-dp2-full", {}, "config.json .*mcore-hybrid"),
    ],
)
def test_what_is_not_told_is_not_guessed(case: str, changed: dict[str, object], told: str) -> None:
    with pytest.raises(MisfitError, match=told) as caught:
        config_of(case, **changed)
    assert "--set config=DIR" in str(caught.value)


def test_families_of_which_a_config_is_derived() -> None:
    """Each by what stands in its own file: one that extends another may be another model."""
    own = {
        name
        for name in families()
        if any(
            part.family == name and "model_type" in part.fixed for part in family(name).configs.get("huggingface", ())
        )
    }
    assert own == {
        *("deepseek-v2", "deepseek-v3", "gpt", "llama", "mixtral", "qwen2", "qwen2-moe", "qwen3", "qwen3-moe"),
    }
