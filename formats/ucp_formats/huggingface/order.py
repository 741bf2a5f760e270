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

from ucp.contract import registry

__all__ = ["by_number", "in_model_order"]

_FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gpt2": "gpt",
    "bloom": "bloom",
    "gpt_neox": "gpt-neox",
}
"""`model_type` of a config.json to the family that knows the order of such a model."""
_NUMBER = re.compile(r"(\d+)")


def in_model_order(names: Iterable[str], model_type: object) -> list[str] | None:
    """Names of parameters in the order of a model of that type; None where it is not known of all of them."""
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return None if family is None else registry.family(family).in_order(names, "huggingface")


def by_number(names: Iterable[str]) -> list[str]:
    """Names in alphabetical order, numbers in them by value.

    >>> by_number(["h.10.w", "h.2.w", "e.w"])
    ['e.w', 'h.2.w', 'h.10.w']
    """
    return sorted(names, key=lambda name: [int(own) if at % 2 else own for at, own in enumerate(_NUMBER.split(name))])
