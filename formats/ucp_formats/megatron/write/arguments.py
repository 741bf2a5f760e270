"""The arguments in a written checkpoint.

Megatron reads the parallel degrees of a checkpoint from them, and compares others with its own (checkpointing.py:
check_checkpoint_args). Arguments of a Megatron source get the new degrees (`update_arguments`). Other sources have
none: most follow from names and shapes (`derive_arguments`), some from a Hugging Face config (`parse_config`). The user
has to give the rest, such as the number of attention heads: nothing is guessed.

>>> shapes = {
...     "decoder.layers.0.self_attention.linear_proj.weight": (32, 24),
...     "decoder.layers.0.self_attention.linear_qkv.weight": (40, 32),
... }
>>> derive_attention(shapes, {"num_attention_heads": 6})
{'kv_channels': 4, 'num_query_groups': 2, 'group_query_attention': True}
>>> parse_config({"n_head": 4, "layer_norm_epsilon": 1e-5})
{'num_attention_heads': 4, 'norm_epsilon': 1e-05}
>>> parse_config({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}})
{'rotary_base': 500000, 'rotary_percent': 1.0, 'rotary_seq_len_interpolation_factor': 4}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeGuard

from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.io.pickle.values import GlobalName, Stub
from ucp_formats.megatron.names import EMBEDDING, OUTPUT

_VIRTUAL = "virtual_pipeline_model_parallel_size"
_GROUP = "microbatch_group_size_per_vp_stage"
"""Defaults to the number of stages."""
_UNEVEN: Mapping[str, object] = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Arguments of uneven pipeline stages, with the values they get if the number of stages or chunks changes."""
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
"""Arguments that Megatron compares when it loads."""
LETTERS = {".mixer.": "M", ".self_attention.": "*", ".experts.": "E", ".mlp.linear_fc1.": "-"}
"""Part of a name to the letter of its layer in patterns of hybrid models."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")

Shapes = Mapping[str, tuple[int, ...]]
"""Canonical name of a tensor to its shape."""


def namespace(arguments: Mapping[str, object]) -> Stub:
    """The arguments as an argparse.Namespace."""
    return Stub(GlobalName("argparse", "Namespace"), state=dict(arguments), has_state=True)


def update_arguments(
    arguments: Mapping[str, object],
    topology: Topology,
    *,
    ckpt_format: str,
    iteration: int,
    has_optimizer: bool,
    has_rng: bool,
) -> dict[str, object]:
    """`arguments` for a run of another topology, whose checkpoint is saved as `ckpt_format`.

    `has_optimizer`, `has_rng`: whether it holds optimizer and RNG states. If not, the arguments say that they were not
    saved, and Megatron does not look for them.
    """
    pp, vpp = topology.pp, topology.vpp if topology.vpp > 1 else None
    layers = arguments.get("num_layers")
    changed: dict[str, object] = {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": pp,
        _VIRTUAL: vpp,
        "context_parallel_size": topology.cp,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.expert_tp,
        "world_size": topology.tp * topology.cp * topology.dp * pp,
        "data_parallel_size": topology.dp,
        "ckpt_format": ckpt_format,
        "iteration": iteration,
    }
    for name, has in (("no_save_optim", has_optimizer), ("no_save_rng", has_rng)):
        if has == bool(arguments.get(name)):
            changed[name] = not has
    optional: dict[str, object] = {
        "transformer_pipeline_model_parallel_size": pp,
        "num_virtual_stages_per_pipeline_rank": vpp,
        "num_layers_per_virtual_pipeline_stage": layers // (pp * vpp) if isinstance(layers, int) and vpp else None,
        "use_dist_ckpt": ckpt_format == "torch_dist",
    }
    if arguments.get(_GROUP) == arguments.get("pipeline_model_parallel_size", pp):
        optional[_GROUP] = pp
    if pp != arguments.get("pipeline_model_parallel_size", 1) or vpp != arguments.get(_VIRTUAL):
        optional |= _UNEVEN
    changed |= {name: value for name, value in optional.items() if name in arguments}
    if ckpt_format == "torch_dist":
        changed["dist_ckpt_optim_fully_reshardable"] = True
    return {**arguments, **changed}


def derive_arguments(
    shapes: Shapes, dtypes: Collection[DType], *, settings: Mapping[str, object], source: str
) -> dict[str, object]:
    """Arguments of a model that follow from its shapes and `settings`, which take precedence.

    `dtypes`: types that the model computes in. `source`: path of the source, for messages. Raises UsageError naming all
    arguments that Megatron needs and that cannot be derived.
    """
    letters = layer_letters(shapes)
    hybrid = {"is_hybrid_model": True, "hybrid_override_pattern": "".join(letters)} if "M" in letters else {}
    dtype = next((half for half in (DType.BFLOAT16, DType.FLOAT16) if half in dtypes), DType.FLOAT32)
    precision = {
        "bf16": dtype is DType.BFLOAT16,
        "fp16": dtype is DType.FLOAT16,
        "params_dtype": GlobalName("torch", dtype.value),
        "use_distributed_optimizer": True,
    }
    arguments = {**_derive_common(shapes), **_derive_feed_forward(shapes), **hybrid, **precision, **settings}
    arguments = {**derive_attention(shapes, arguments), **arguments}
    missing = [name for name in _NEEDED if arguments.get(name) is None]
    if missing:
        options = " ".join(f"--set {name}=..." for name in missing)
        raise UsageError(
            f"expected {', '.join(missing)}, which Megatron compares when it loads; {source} is not a checkpoint of "
            f"Megatron, and its shapes do not determine them. Add {options}"
        )
    return {name: value for name, value in arguments.items() if value is not None}


def derive_attention(shapes: Shapes, arguments: Mapping[str, object]) -> dict[str, object]:
    """Sizes of fused attention that follow from `arguments`; nothing for other kinds of attention."""
    rows, columns = _length(shapes, ".linear_qkv.weight", 0), _length(shapes, ".linear_proj.weight", 1)
    heads = arguments.get("num_attention_heads")
    width = arguments.get("kv_channels") or _length(shapes, ".q_layernorm.weight", 0)
    if rows is None or columns is None:
        return {}
    if not isinstance(heads, int) and isinstance(width, int):
        heads = columns // width
    if not isinstance(heads, int) or heads < 1 or columns % heads:
        return {}
    channels = columns // heads
    groups, remainder = divmod(rows - columns, 2 * channels)
    sizes: dict[str, object] = {} if arguments.get("num_attention_heads") else {"num_attention_heads": heads}
    sizes["kv_channels"] = channels
    if remainder == 0 and groups > 0 and heads % groups == 0:  # false for gated queries
        sizes |= {"num_query_groups": groups, "group_query_attention": groups < heads}
    return sizes


def _length(shapes: Shapes, suffix: str, dim: int) -> int | None:
    """Length of a dim of all tensors with this suffix; None if there is none, or they differ."""
    lengths = {shape[dim] for name, shape in shapes.items() if name.endswith(suffix) and ".experts." not in name}
    return lengths.pop() if len(lengths) == 1 else None


def _layer_numbers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := _LAYER.match(name))}


def _derive_common(shapes: Shapes) -> dict[str, object]:
    """Arguments that do not depend on the kind of layers."""
    layers = _layer_numbers(shapes)
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


def _derive_feed_forward(shapes: Shapes) -> dict[str, object]:
    """Arguments of dense layers and experts."""
    wide, narrow = _length(shapes, ".mlp.linear_fc1.weight", 0), _length(shapes, ".mlp.linear_fc2.weight", 1)
    sizes: dict[str, object] = {"ffn_hidden_size": narrow}
    experts = {name: match for name in shapes if (match := _EXPERT.search(name))}
    fc1, fc2 = (next((shapes[n] for n in experts if part in n), None) for part in ("fc1.weight", "fc2.weight"))
    if fc1 and fc2:
        sizes |= {
            "num_experts": max(int(match[1]) for match in experts.values()) + 1,
            "moe_ffn_hidden_size": fc2[1],
            "swiglu": fc1[0] == 2 * fc2[1],
            "ffn_hidden_size": narrow or fc2[1],
        }
        layers, routed = _layer_numbers(shapes), _layer_numbers(experts)
        if routed != layers:
            sizes["moe_layer_freq"] = [int(layer in routed) for layer in sorted(layers)]
        if (shared := _length(shapes, ".shared_experts.linear_fc2.weight", 1)) is not None:
            sizes["moe_shared_expert_intermediate_size"] = shared
    elif wide and narrow:
        sizes["swiglu"] = wide == 2 * narrow
    return sizes


def layer_letters(names: Iterable[str]) -> list[str]:
    """Letters of every layer in patterns of hybrid models; several for a layer with several kinds of modules.

    >>> layer_letters(["decoder.layers.0.mixer.D", "decoder.layers.1.mlp.linear_fc1.weight"])
    ['M', '-']
    """
    letters: dict[int, str] = {}
    for name in names:
        layer = _LAYER.match(name)
        letter = next((letter for part, letter in LETTERS.items() if part in name), "")
        if layer and letter not in (others := letters.get(int(layer[1]), "")):
            letters[int(layer[1])] = others + letter
    return [letters.get(number, "-") for number in range(max(letters, default=-1) + 1)]


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
"""Argument to its keys in a config (transformers 4 and 5)."""
_LATENT, _LATENT_UNKNOWN = "kv_lora_rank", ("num_query_groups", "kv_channels", "rotary_percent")
"""Key of models with latent attention, and the arguments whose keys have another meaning there."""
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Constants in Megatron (megatron-core 0.19, rotary_pos_embedding.py: _apply_scaling)."""
_LARGEST = 1e18
"""Larger than any argument; JSON allows numbers that do not fit a float, and infinity."""


def parse_config(config: Mapping[str, object]) -> dict[str, object]:
    """Arguments in a Hugging Face config."""
    rope = _rope_parameters(config)
    values = {**rope, **{key: value for key, value in config.items() if value is not None}}
    arguments: dict[str, int | float] = {}
    for name, keys in _CONFIG_KEYS.items():
        value = next((values[key] for key in keys if key in values), None)
        if _is_number(value):
            arguments[name] = value
    if "rotary_base" in arguments:
        arguments["rotary_base"] = int(arguments["rotary_base"])
        arguments.setdefault("rotary_percent", 1.0)
    scaling = _scaling_arguments(rope)
    # without rotary_percent, ucp makes no config.json from these arguments: it would lack the scaling
    for name in _LATENT_UNKNOWN if _LATENT in config else ("rotary_percent",) if scaling is None else ():
        arguments.pop(name, None)
    return {**arguments, **(scaling or {})}


def scaling_note(config: Mapping[str, object]) -> str | None:
    """Options that a run needs for the rotary scaling in `config`; None without scaling."""
    rope = _rope_parameters(config)
    scaling = _scaling_arguments(rope)
    if scaling == {}:
        return None
    values = ", ".join(f"{key}={value}" for key, value in sorted(rope.items()) if key not in ("rope_theta", "type"))
    start = f"config.json scales rotary positions ({values}), which Megatron does not take from a checkpoint"
    if scaling is None:
        return (
            f"{start}: the weights are right, but a run without this scaling computes other results. The arguments "
            "written do not contain it; start the run with the options that your Megatron has for it, if any"
        )
    options = (f"--{name.replace('_', '-')}" + ("" if v is True else f" {v}") for name, v in scaling.items())
    return f"{start}: start the run with {' '.join(options)}, or it computes other results"


def _rope_parameters(config: Mapping[str, object]) -> dict[str, object]:
    """Parameters of rotary positions, of transformers 4 (rope_scaling) or 5 (rope_parameters)."""
    rope: dict[str, object] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(entry := config.get(key), dict):
            rope |= {name: value for name, value in entry.items() if value is not None}
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
    return rope


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _scaling_arguments(rope: Mapping[str, object]) -> dict[str, object] | None:
    """Arguments for the scaling of rotary positions; empty without scaling, None if `ucp` has no arguments for it."""
    match rope:
        case {"rope_type": "llama3", "factor": factor} if _is_number(factor):
            same = all(rope.get(key) == value for key, value in _LLAMA3.items())
            return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)} if same else None
        case {"rope_type": "linear", "factor": factor} if _is_number(factor) and factor == int(factor):
            return {"rotary_seq_len_interpolation_factor": int(factor)}
        case {"rope_type": kind} if kind != "default":
            return None
        case _:
            return {}
