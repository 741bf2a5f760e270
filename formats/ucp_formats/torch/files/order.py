"""The order in which models of transformers register their parameters, which safetensors does not keep.

An optimizer that numbers its parameters counts them in that order. It is known for the models of `_ORDERS`, by the
`model_type` in `config.json`; a test compares each with the model itself (transformers 5.23).

>>> in_order(["model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.q_proj.weight"], "llama")
['model.layers.0.self_attn.q_proj.weight', 'model.layers.0.self_attn.o_proj.weight']
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ucp.io.json_text import NotJson, parsed

__all__ = ["MODEL_TYPES", "in_order", "model_type"]

_DECODER = (
    "embed_tokens",
    (
        *(f"self_attn.{own}" for own in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_norm", "k_norm")),
        *(f"mlp.{own}" for own in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")),
        *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "norm",
    "lm_head",
)
_GPT2 = ("wte", "wpe", ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"), "ln_f", "lm_head")
_GPT_NEOX = (
    "embed_in",
    (
        *("input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense"),
        *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "final_layer_norm",
    "embed_out",
    "lm_head",
)
_DECODERS = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
_ORDERS: dict[str, tuple[str | tuple[str, ...], ...]] = {
    **dict.fromkeys(_DECODERS, _DECODER),
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
}
"""Model to its modules; those of a layer stand in one tuple."""

MODEL_TYPES = tuple(sorted(_ORDERS))
"""Models whose order is known."""

_NAME = re.compile(r"(?:model\.|transformer\.|gpt_neox\.)?(?:(?:layers|h)\.(\d+)\.)?(.+)\.(weight|bias)")
"""`model.layers.3.mlp.up_proj.weight`: the layer, the module, the parameter."""


def model_type(folder: str) -> str | None:
    """What `config.json` in `folder` says that the model is."""
    try:
        config = parsed((Path(folder) / "config.json").read_bytes())
    except (OSError, NotJson):
        return None
    found = config.get("model_type") if isinstance(config, dict) else None
    return found if isinstance(found, str) else None


def in_order(names: Iterable[str], kind: str | None) -> list[str] | None:
    """Names in the order of a model of that type; None where it, or one of the names, is not known."""
    order = _ORDERS.get(kind or "")
    keys = {name: _key(name, order) for name in names} if order is not None else {}
    known = {name: key for name, key in keys.items() if key is not None}
    return sorted(known, key=known.__getitem__) if known and len(known) == len(keys) else None


def _key(name: str, order: tuple[str | tuple[str, ...], ...]) -> tuple[int, int, int, bool] | None:
    """Where a parameter stands: place of the module or of its layer, layer, module in it, whether it is a bias."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    layer, module, leaf = found.groups()
    for at, own in enumerate(order):
        if isinstance(own, tuple):
            if layer is not None and module in own:
                return at, int(layer), own.index(module), leaf == "bias"
        elif layer is None and module == own:
            return at, 0, 0, leaf == "bias"
    return None
