"""The arguments that a written checkpoint carries.

Megatron takes the layout of a checkpoint from them, and compares some with its own when it loads (checkpointing.py:
check_checkpoint_args). A source of Megatron has them, and the sizes of the layout are put right (`relaid_arguments`). A
source of another framework has none: most follow from names and shapes (`derived_arguments`), some a Hugging Face
configuration states (`configured`). What stays open, as how many heads share the rows of an attention matrix, is asked
for, never guessed.

>>> shapes = {
...     "decoder.layers.0.self_attention.linear_proj.weight": (32, 24),
...     "decoder.layers.0.self_attention.linear_qkv.weight": (40, 32),
... }
>>> attention(shapes, {"num_attention_heads": 6})
{'kv_channels': 4, 'num_query_groups': 2, 'group_query_attention': True}
>>> configured({"n_head": 4, "layer_norm_epsilon": 1e-5})
{'num_attention_heads': 4, 'norm_epsilon': 1e-05}
>>> configured({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}})
{'rotary_base': 500000, 'rotary_percent': 1.0, 'rotary_seq_len_interpolation_factor': 4}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.io.pickle.values import GlobalName, Stub
from ucp_formats.megatron.names import EMBEDDING, OUTPUT

_NAMESPACE = GlobalName("argparse", "Namespace")
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_GROUP = "microbatch_group_size_per_vp_stage"
"""As many as stages, where a run does not say."""
_UNEVEN: Mapping[str, object] = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Arguments that deal layers out unevenly over the stages of one pipeline; others have equal stages."""


def namespace(arguments: Mapping[str, object]) -> Stub:
    """The arguments as argparse keeps them."""
    return Stub(_NAMESPACE, state=dict(arguments), has_state=True)


def relaid_arguments(
    arguments: Mapping[str, object],
    own: Topology,
    *,
    ckpt_format: str,
    iteration: int,
    has_optimizer: bool,
    has_random: bool,
) -> dict[str, object]:
    """`arguments` for a run of layout `own`, whose checkpoint is saved as `ckpt_format`.

    `has_optimizer`, `has_random`: whether it holds optimizer and random states; Megatron asks for neither where the
    arguments say that they were not saved.
    """
    virtual = own.vpp if own.vpp > 1 else None
    layers = arguments.get("num_layers")
    changed: dict[str, object] = {
        "tensor_model_parallel_size": own.tp,
        "pipeline_model_parallel_size": own.pp,
        _VIRTUAL: virtual,
        "context_parallel_size": own.cp,
        "expert_model_parallel_size": own.ep,
        "expert_tensor_parallel_size": own.expert_tp,
        "world_size": own.tp * own.cp * own.dp * own.pp,
        "data_parallel_size": own.dp,
        "ckpt_format": ckpt_format,
        "iteration": iteration,
    }
    for name, has in (("no_save_optim", has_optimizer), ("no_save_rng", has_random)):
        if has == bool(arguments.get(name)):
            changed[name] = not has
    each = layers // (own.pp * own.vpp) if isinstance(layers, int) and virtual else None
    known: dict[str, object] = {
        "transformer_pipeline_model_parallel_size": own.pp,
        "num_virtual_stages_per_pipeline_rank": virtual,
        "num_layers_per_virtual_pipeline_stage": each,
        "use_dist_ckpt": ckpt_format == "torch_dist",
    }
    if arguments.get(_GROUP) == arguments.get("pipeline_model_parallel_size", own.pp):
        known[_GROUP] = own.pp
    if own.pp != arguments.get("pipeline_model_parallel_size", 1) or virtual != arguments.get(_VIRTUAL):
        known |= _UNEVEN
    changed |= {name: value for name, value in known.items() if name in arguments}
    if ckpt_format == "torch_dist":
        changed["dist_ckpt_optim_fully_reshardable"] = True
    return {**arguments, **changed}


Shapes = Mapping[str, tuple[int, ...]]
"""Canonical name of a tensor to its shape."""

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
"""What Megatron compares when it loads."""
LETTERS = {".mixer.": "M", ".self_attention.": "*", ".experts.": "E", ".mlp.linear_fc1.": "-"}
"""Part of a name to the letter of a layer that has it, in patterns of hybrid models."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def derived_arguments(
    shapes: Shapes, dtypes: Iterable[DType], *, asked: Mapping[str, object], source: str
) -> dict[str, object]:
    """Arguments of a model, as far as they are certain.

    Parameters
    ----------
    shapes
        Canonical name of every tensor to its shape.
    dtypes
        Types that the model computes in.
    asked
        Values that the user gave; they come before all others.
    source
        Where the model comes from, for messages.

    Raises
    ------
    UsageError
        Values that Megatron needs are not certain; all are named.
    """
    letters = layer_letters(shapes)
    hybrid = {"is_hybrid_model": True, "hybrid_override_pattern": "".join(letters)} if "M" in letters else {}
    computed = set(dtypes)
    dtype = next((own for own in (DType.BFLOAT16, DType.FLOAT16) if own in computed), DType.FLOAT32)
    precision = {
        "bf16": dtype is DType.BFLOAT16,
        "fp16": dtype is DType.FLOAT16,
        "params_dtype": GlobalName("torch", dtype.value),
        "use_distributed_optimizer": True,
    }
    found = {**_frame(shapes), **_feed_forward(shapes), **hybrid, **precision, **asked}
    found = {**attention(shapes, found), **found}
    lacking = [name for name in _NEEDED if found.get(name) is None]
    if lacking:
        given = " ".join(f"--set {name}=..." for name in lacking)
        raise UsageError(
            f"expected {', '.join(lacking)}, which Megatron compares when it loads; {source} is no checkpoint of "
            f"Megatron, and its shapes do not tell. Give them: {given}"
        )
    return {name: value for name, value in found.items() if value is not None}


def attention(shapes: Shapes, known: Mapping[str, object]) -> dict[str, object]:
    """Sizes of fused attention, as far as they follow from `known` ones; nothing for other kinds."""
    rows, columns = _of(shapes, ".linear_qkv.weight", 0), _of(shapes, ".linear_proj.weight", 1)
    heads, width = known.get("num_attention_heads"), known.get("kv_channels") or _of(shapes, ".q_layernorm.weight", 0)
    if rows is None or columns is None:
        return {}
    if not isinstance(heads, int) and isinstance(width, int):
        heads = columns // width
    if not isinstance(heads, int) or heads < 1 or columns % heads:
        return {}
    each = columns // heads
    groups, rest = divmod(rows - columns, 2 * each)
    found: dict[str, object] = {} if known.get("num_attention_heads") else {"num_attention_heads": heads}
    found["kv_channels"] = each
    if rest == 0 and groups > 0 and heads % groups == 0:  # else queries are gated, or the like
        found |= {"num_query_groups": groups, "group_query_attention": groups < heads}
    return found


def _of(shapes: Shapes, ending: str, dim: int) -> int | None:
    """Length of a dim that all tensors with this ending share; None where there is none, or they differ."""
    lengths = {shape[dim] for name, shape in shapes.items() if name.endswith(ending) and ".experts." not in name}
    return lengths.pop() if len(lengths) == 1 else None


def _frame(shapes: Shapes) -> dict[str, object]:
    """Everything around the layers."""
    layers = {int(found[1]) for name in shapes if (found := _LAYER.match(name))}
    words = shapes.get(EMBEDDING)
    positions = shapes.get("embedding.position_embeddings.weight")
    return {
        "num_layers": max(layers) + 1 if layers else None,
        "hidden_size": words[1] if words else None,
        "padded_vocab_size": words[0] if words else None,
        "untie_embeddings_and_output_weights": OUTPUT in shapes,
        "add_position_embedding": positions is not None,
        "position_embedding_type": "learned_absolute" if positions else "rope",
        "max_position_embeddings": positions[0] if positions else None,
        "normalization": "LayerNorm" if any(name.endswith("norm.bias") for name in shapes) else "RMSNorm",
        "add_bias_linear": any(name.endswith(".linear_proj.bias") for name in shapes),
        "add_qkv_bias": any(name.endswith(".linear_qkv.bias") for name in shapes),
        "qk_layernorm": any(name.endswith(".q_layernorm.weight") for name in shapes),
    }


def _feed_forward(shapes: Shapes) -> dict[str, object]:
    """Dense layers and experts."""
    wide, narrow = _of(shapes, ".mlp.linear_fc1.weight", 0), _of(shapes, ".mlp.linear_fc2.weight", 1)
    found: dict[str, object] = {"ffn_hidden_size": narrow}
    numbers = {int(own[1]) for name in shapes if (own := _EXPERT.search(name))}
    first, second = (
        next((shape for name, shape in shapes.items() if _EXPERT.search(name) and part in name), None)
        for part in ("fc1.weight", "fc2.weight")
    )
    if first and second:
        found |= {
            "num_experts": max(numbers) + 1,
            "moe_ffn_hidden_size": second[1],
            "swiglu": first[0] == 2 * second[1],
            "ffn_hidden_size": narrow or second[1],
        }
        layers = {int(own[1]) for name in shapes if (own := _LAYER.match(name))}
        routed = {int(own[1]) for name in shapes if (own := _LAYER.match(name)) and _EXPERT.search(name)}
        if routed != layers:
            found["moe_layer_freq"] = [int(layer in routed) for layer in sorted(layers)]
        if (shared := _of(shapes, ".shared_experts.linear_fc2.weight", 1)) is not None:
            found["moe_shared_expert_intermediate_size"] = shared
    elif wide and narrow:
        found["swiglu"] = wide == 2 * narrow
    return found


def layer_letters(names: Iterable[str]) -> list[str]:
    """Letters of every layer, as patterns of hybrid models have them; several for one that holds several modules.

    >>> layer_letters(["decoder.layers.0.mixer.D", "decoder.layers.1.mlp.linear_fc1.weight"])
    ['M', '-']
    """
    kinds: dict[int, str] = {}
    for name in names:
        own = _LAYER.match(name)
        letter = next((letter for part, letter in LETTERS.items() if part in name), "")
        if own and letter not in (held := kinds.get(int(own[1]), "")):
            kinds[int(own[1])] = held + letter
    return [kinds.get(at, "-") for at in range(max(kinds, default=-1) + 1)]


_CONFIG_KEYS = {
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "rotary_base": ("rope_theta",),
    "max_position_embeddings": ("max_position_embeddings",),
    "vocab_size": ("vocab_size",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "rotary_percent": ("partial_rotary_factor", "rotary_pct"),
}
"""Argument to the keys that may say it (transformers 4 and 5)."""
_LATENT, _OTHERWISE = "kv_lora_rank", ("num_query_groups", "kv_channels", "rotary_percent")
"""Key of models with latent attention, and the arguments that mean another thing there."""
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Numbers that no argument of Megatron changes (megatron-core 0.19, rotary_pos_embedding.py: _apply_scaling)."""

_MOST = 1e18
"""Above any argument; JSON has numbers that are no float, and infinity."""


def configured(config: Mapping[str, object]) -> dict[str, object]:
    """Arguments that `config` states."""
    rope = _rope(config)
    every = {**rope, **{key: own for key, own in config.items() if own is not None}}
    found = {name: next((every[key] for key in keys if key in every), None) for name, keys in _CONFIG_KEYS.items()}
    plain: dict[str, int | float] = {name: value for name, value in found.items() if _is_number(value)}
    if "rotary_base" in plain:
        plain["rotary_base"] = int(plain["rotary_base"])
        plain.setdefault("rotary_percent", 1.0)
    scaling = _scaling(rope)
    for name in _OTHERWISE if _LATENT in config else ("rotary_percent",) if scaling is None else ():
        plain.pop(name, None)  # without rotary_percent no config.json is made of the run, which would lack the scaling
    return {**plain, **(scaling or {})}


def scaling_note(config: Mapping[str, object]) -> str | None:
    """What a run has to be started with for the rotary positions that `config` states; None where they are plain."""
    rope = _rope(config)
    scaling = _scaling(rope)
    if scaling == {}:
        return None
    told = ", ".join(f"{key}={own}" for key, own in sorted(rope.items()) if key not in ("rope_theta", "type"))
    start = f"config.json scales rotary positions ({told}), which Megatron does not take from a checkpoint"
    if scaling is None:
        return (
            f"{start}: the weights are right, and a run without the same scaling computes something else. What is "
            "written does not say it; start the run with what your Megatron has for it, if anything"
        )
    options = " ".join(
        f"--{name.replace('_', '-')}" + ("" if own is True else f" {own}") for name, own in scaling.items()
    )
    return f"{start}: start the run with {options}, or it computes something else"


def _rope(config: Mapping[str, object]) -> dict[str, object]:
    """What is said of rotary positions, by transformers 4 (rope_scaling) or 5 (rope_parameters)."""
    found: dict[str, object] = {}
    for key in ("rope_scaling", "rope_parameters"):
        own = config.get(key)
        found |= {name: value for name, value in own.items() if value is not None} if isinstance(own, dict) else {}
    if "type" in found:
        found.setdefault("rope_type", found["type"])
    return found


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


def _scaling(rope: Mapping[str, object]) -> dict[str, object] | None:
    """Arguments for a scaling of rotary positions; empty where there is none, None for one that they do not tell."""
    match rope:
        case {"rope_type": "llama3", "factor": factor} if _is_number(factor):
            same = all(rope.get(key) == own for key, own in _LLAMA3.items())
            return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)} if same else None
        case {"rope_type": "linear", "factor": factor} if _is_number(factor) and factor == int(factor):
            return {"rotary_seq_len_interpolation_factor": int(factor)}
        case {"rope_type": kind} if kind != "default":
            return None
        case _:
            return {}
