"""Arguments of a model whose checkpoint records none: what names and shapes tell for certain, and what the user says.

A source of another framework has no arguments of Megatron. Most follow from the shapes; how many heads share the rows
of an attention matrix does not, unless queries are normed per head. What stays open is asked for, never guessed.

>>> shapes = {
...     "decoder.layers.0.self_attention.linear_proj.weight": (32, 24),
...     "decoder.layers.0.self_attention.linear_qkv.weight": (40, 32),
... }
>>> attention(shapes, {"num_attention_heads": 6})
{'kv_channels': 4, 'num_query_groups': 2, 'group_query_attention': True}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ucp.core.dtypes import DType
from ucp.core.pickle_values import GlobalName
from ucp.errors import UsageError

__all__ = ["LETTERS", "attention", "derived_arguments", "layer_letters"]

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
    found = {**_frame(shapes), **_feed_forward(shapes), **_hybrid(shapes), **_precision(dtypes), **asked}
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
    words = shapes.get("embedding.word_embeddings.weight")
    positions = shapes.get("embedding.position_embeddings.weight")
    return {
        "num_layers": max(layers) + 1 if layers else None,
        "hidden_size": words[1] if words else None,
        "padded_vocab_size": words[0] if words else None,
        "untie_embeddings_and_output_weights": "output_layer.weight" in shapes,
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
            **_expert_layers(shapes),
        }
    elif wide and narrow:
        found["swiglu"] = wide == 2 * narrow
    return found


def _expert_layers(shapes: Shapes) -> dict[str, object]:
    """Which layers have experts, where not all do; and the shared ones."""
    layers = {int(own[1]) for name in shapes if (own := _LAYER.match(name))}
    routed = {int(own[1]) for name in shapes if (own := _LAYER.match(name)) and _EXPERT.search(name)}
    shared = _of(shapes, ".shared_experts.linear_fc2.weight", 1)
    found: dict[str, object] = {} if shared is None else {"moe_shared_expert_intermediate_size": shared}
    return (
        found if routed == layers else {**found, "moe_layer_freq": [int(layer in routed) for layer in sorted(layers)]}
    )


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


def _hybrid(shapes: Shapes) -> dict[str, object]:
    """The letters of the layers of a model with Mamba mixers (megatron-core: mamba_hybrid_layer_allocation.py)."""
    letters = layer_letters(shapes)
    return {"is_hybrid_model": True, "hybrid_override_pattern": "".join(letters)} if "M" in letters else {}


def _precision(dtypes: Iterable[DType]) -> dict[str, object]:
    seen = set(dtypes)
    dtype = next((own for own in (DType.BFLOAT16, DType.FLOAT16) if own in seen), DType.FLOAT32)
    return {
        "bf16": dtype is DType.BFLOAT16,
        "fp16": dtype is DType.FLOAT16,
        "params_dtype": GlobalName("torch", dtype.value),
        "use_distributed_optimizer": True,
    }
