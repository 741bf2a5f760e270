"""The order in which a model of transformers registers its parameters, which safetensors files do not keep.

They sort tensors by name. DeepSpeed's flat buffers hold parameters in the order of the model and record no names, so
the order has to be known for them. It is that of `named_parameters()` in transformers 5.23 (and 4.28 on) for the kinds
of models listed here, whose names on disk are those in memory; experts are stacked in memory, so no such model is here.

>>> names = ["lm_head.weight", "model.norm.weight", "model.layers.10.mlp.up_proj.weight", "model.embed_tokens.weight",
...          "model.layers.2.mlp.up_proj.weight", "model.layers.2.self_attn.k_proj.weight"]
>>> for name in in_model_order(names, "llama"):
...     print(name)
model.embed_tokens.weight
model.layers.2.self_attn.k_proj.weight
model.layers.2.mlp.up_proj.weight
model.layers.10.mlp.up_proj.weight
model.norm.weight
lm_head.weight
>>> in_model_order(["model.surprise.weight"], "llama") is None
True
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["by_number", "in_model_order"]

_LLAMA = (
    "model lm_head embed_tokens layers norm self_attn mlp input_layernorm post_attention_layernorm q_proj k_proj "
    "v_proj o_proj q_norm k_norm gate_proj up_proj down_proj weight bias"
)
_GPT2 = "transformer lm_head wte wpe h ln_f ln_1 attn ln_2 mlp c_attn c_fc c_proj weight bias"
_BLOOM = (
    "transformer lm_head word_embeddings word_embeddings_layernorm h ln_f input_layernorm self_attention "
    "post_attention_layernorm mlp query_key_value dense dense_h_to_4h dense_4h_to_h weight bias"
)
_NEOX = (
    "gpt_neox lm_head embed_out embed_in layers final_layer_norm input_layernorm post_attention_layernorm attention "
    "mlp query_key_value dense dense_h_to_4h dense_4h_to_h weight bias"
)
_MODULES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "gpt2": _GPT2,
    "bloom": _BLOOM,
    "gpt_neox": _NEOX,
}
"""`model_type` of a config.json to the modules of such a model, those of one module in their order."""
_NUMBER = re.compile(r"(\d+)")


def in_model_order(names: Iterable[str], model_type: object) -> list[str] | None:
    """Names of parameters in the order of a model of that type; None where it is not known of all of them."""
    modules = _MODULES.get(model_type) if isinstance(model_type, str) else None
    if modules is None:
        return None
    places = {module: place for place, module in enumerate(modules.split())}
    keys: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        if not all(part in places or part.isdecimal() for part in parts):
            return None
        keys[name] = [int(part) if part.isdecimal() else places[part] for part in parts]
    return sorted(keys, key=keys.__getitem__)


def by_number(names: Iterable[str]) -> list[str]:
    """Names in alphabetical order, numbers in them by value.

    >>> by_number(["h.10.w", "h.2.w", "e.w"])
    ['e.w', 'h.2.w', 'h.10.w']
    """
    return sorted(names, key=lambda name: [int(own) if at % 2 else own for at, own in enumerate(_NUMBER.split(name))])
