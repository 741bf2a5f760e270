"""Runs transformers and megatron-core side by side, on the same weights under the names of each.

python forward_worker.py MODEL ...

Needs ucp and transformers, and megatron-core on PYTHONPATH. A model of the table of `make_hf_names` is made and saved
by transformers with large random weights; what its file holds is brought to canonical tensors by the family's rules,
and set as the weights of megatron-core's GPTModel, whose names are the canonical ones. A line of JSON for each:
`model`, `largest` logit, largest `difference`, and the difference when attention is joined without regard to groups
(`unordered`).
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "megatron"))
sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "huggingface"))

import torch
import transformers.models.auto.modeling_auto  # before the stand-ins for CUDA
from make_hf_names import LANGUAGE, MODELS, Model, built
from megatron_shims import install, kernels, patch_mcore
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from ucp.contract.registry import family as family_of
from ucp.families.expression import Expression
from ucp.families.family import Family
from ucp.families.rule import Alias

SERIAL = {"gpt-neox": {"use_parallel_residual": False, "hidden_size": 32}}
"""Attention and feed-forward one after the other, as megatron-core has them, and an even number of rotary dims."""

LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": silu, "add_bias_linear": False}
LATENT = LLAMA | {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope", "rotary_base": 10000}
KINDS = {
    "gpt": {"activation_func": partial(gelu, approximate="tanh")},
    "gpt-neox": {"activation_func": gelu},
    "llama": LLAMA,
    "qwen2": LLAMA | {"add_qkv_bias": True},
    "qwen3": LLAMA | {"qk_layernorm": True},
    "mixtral": LLAMA,
    "qwen2-moe": LLAMA | {"add_qkv_bias": True, "moe_shared_expert_gate": True, "moe_router_pre_softmax": True},
    "qwen3-moe": LLAMA | {"qk_layernorm": True, "moe_router_pre_softmax": True},
    "deepseek-moe": LLAMA | {"moe_router_pre_softmax": True},
    "deepseek-v2": LATENT | {"moe_router_pre_softmax": True},
    "deepseek-v3": LATENT | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}
"""Family to what megatron-core must be told beside sizes."""

SIZES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("v_head_dim", "head_dim"),
    "layernorm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "num_moe_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
"""Option of megatron-core to the keys of a configuration that may say it."""


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    install()
    with kernels():
        from megatron_model import load_mcore

        load_mcore()
    patch_mcore(fused_adam=False)
    start()
    for name in sys.argv[1:]:
        compare(name, replace(MODELS[name], settings=MODELS[name].settings | SERIAL.get(name, {})))


def start() -> None:
    """One rank, and what a forward pass needs beside."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # 0.16 asks for it by name where there is no Transformer Engine
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


@torch.no_grad()
def compare(name: str, model: Model) -> None:
    theirs = built(model).float().eval()
    randomize(theirs)
    stored, config = saved(theirs)
    if model.language:
        stored = {key: own for key, own in stored.items() if key.startswith(LANGUAGE)}
        config = config["text_config"]
    shapes = {key: tuple(own.shape) for key, own in stored.items()}
    family = family_of(model.family).bind(arguments=config, shapes=shapes)
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(5))
    wanted = theirs(input_ids=tokens).logits
    whole = canonical(family, stored)
    ours = gpt_model(model.family, config, whole)
    found = logits(ours, whole, tokens)
    unordered = logits(ours, canonical(family, stored, ordered=False), tokens)
    report = {
        "model": name,
        "largest": wanted.abs().max().item(),
        "difference": (found - wanted).abs().max().item(),
        "unordered": (unordered - wanted).abs().max().item(),
    }
    print(json.dumps(report), flush=True)


def randomize(module: nn.Module) -> None:
    """Weights large enough that every one shows in the logits; norms around one, so that none is the identity."""
    generator = torch.Generator().manual_seed(0)
    tensors = [*module.named_parameters(), *(own for own in module.named_buffers() if "e_score" in own[0])]
    for name, tensor in tensors:
        norm = tensor.ndim == 1 and ("norm" in name or "ln_" in name) and name.endswith("weight")
        tensor.copy_(norm + 0.25 * torch.randn(tensor.shape, generator=generator))


def saved(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors and configuration as transformers writes them."""
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        tensors = {name: own for path in Path(folder).glob("*.safetensors") for name, own in load_file(path).items()}
        return tensors, json.loads((Path(folder) / "config.json").read_text())


def canonical(family: Family, stored: Mapping[str, Tensor], *, ordered: bool = True) -> dict[str, Tensor]:
    """Canonical tensors from those of a file; not `ordered`: what joins in turns joins in one."""
    parts: dict[str, dict[int, tuple[Alias, Tensor]]] = defaultdict(dict)
    for name, tensor in stored.items():
        named = family.read(name, "huggingface")
        parts[named.canonical][named.part] = (named.alias, tensor)
    whole = {}
    for name, own in parts.items():
        alias = own[0][0] if ordered else replace(own[0][0], groups=Expression("1"))
        whole[name] = joined(alias, [own[part][1] for part in sorted(own)], family.values)
    return whole


def joined(alias: Alias, tensors: list[Tensor], values: Mapping[str, int]) -> Tensor:
    seen = [alias.elements(tuple(own.shape), values) for own in tensors]
    pairs = alias.locate_parts([own.shape for own in seen], values)
    whole = torch.full([max(stops) for stops in zip(*(own.global_box.stops for own in pairs), strict=True)], torch.nan)
    views = [own.contiguous().as_strided(*look) for own, look in zip(tensors, seen, strict=True)]
    for own in pairs:
        into, of = (tuple(map(slice, box.offsets, box.stops)) for box in (own.global_box, own.local))
        whole[into] = views[own.tensor][of]
    return whole


def gpt_model(family: str, config: Mapping[str, object], whole: Mapping[str, Tensor]) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    own = transformer_config(family, config, whole)
    latent = getattr(own, "multi_latent_attention", False)
    spec = (
        get_gpt_decoder_block_spec(own, use_transformer_engine=False)
        if own.num_moe_experts
        else get_gpt_layer_local_spec(
            qk_layernorm=own.qk_layernorm, multi_latent_attention=latent, normalization=own.normalization
        )
    )
    rope = config.get("rope_parameters") or {}
    return GPTModel(
        config=own,
        transformer_layer_spec=spec,
        vocab_size=64,
        max_sequence_length=config.get("n_positions", 16),
        share_embeddings_and_output_weights="output_layer.weight" not in whole,
        position_embedding_type="learned_absolute" if family == "gpt" else "rope",
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        rotary_base=int(rope.get("rope_theta", 10000)),
    ).eval()


def transformer_config(family: str, config: Mapping[str, object], whole: Mapping[str, Tensor]) -> object:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if "multi_latent_attention" in KINDS[family] else TransformerConfig
    known = {field.name for field in fields(kind)}
    found = {own: next((config[k] for k in keys if config.get(k) is not None), None) for own, keys in SIZES.items()}
    options = {own: value for own, value in found.items() if value is not None and own in known}
    options.setdefault("ffn_hidden_size", 4 * options["hidden_size"])
    if kind is MLATransformerConfig:
        options |= {"q_lora_rank": config["q_lora_rank"], "num_query_groups": None}
    if "num_moe_experts" not in options:
        options = {name: own for name, own in options.items() if not name.startswith("moe_")}
    else:
        dense = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" in whole for layer in range(options["num_layers"])]
        shared = [own.shape[1] for name, own in whole.items() if name.endswith("shared_experts.linear_fc2.weight")]
        options |= {
            "moe_layer_freq": [int(not own) for own in dense],
            "moe_shared_expert_intermediate_size": shared[0] if shared else None,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
        }
    fused = ("masked_softmax_fusion", "apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")
    quiet = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "persist_layer_norm": False,
    }
    return kind(**quiet, **dict.fromkeys(fused, False), **options, **KINDS[family])


def logits(module: nn.Module, whole: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits of megatron-core with these weights. Raises when its names are others, or its shapes."""
    state = {name: own for name, own in module.state_dict().items() if isinstance(own, Tensor)}
    state = {name: own for name, own in state.items() if not name.endswith(("_extra_state", "tokens_per_expert"))}
    if names := sorted(state.keys() ^ whole.keys()):
        raise SystemExit(f"expected the names of megatron-core; got others: {', '.join(names)}")
    for name, own in state.items():
        if own.shape != whole[name].shape:
            raise SystemExit(f"{name}: expected {list(own.shape)}; got {list(whole[name].shape)}")
        own.copy_(whole[name])
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    return module(tokens, torch.arange(length).expand_as(tokens), mask)


if __name__ == "__main__":
    main()
