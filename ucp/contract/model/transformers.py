"""What is known of models of transformers that their files do not say: the order of parameters, and which are tied.

Safetensors sorts tensors by name. DeepSpeed's flat buffers hold parameters in the order in which the model registers
them and record no names, and an optimizer numbers them in it. It is that of `named_parameters()` in transformers 5.23
(and 4.28 on) for the kinds of models listed here, whose names on disk are those in memory; experts are stacked in
memory, so no such model is here.

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
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ucp.contract import registry

if TYPE_CHECKING:
    from ucp.families.family import Family

__all__ = ["MODEL_TYPES", "by_number", "family_of_type", "in_model_order", "tied_output"]

_FAMILIES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "smollm3"), "llama"),
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gpt2": "gpt",
    "bloom": "bloom",
    "gpt_neox": "gpt-neox",
}
"""`model_type` of a config.json to the family whose modules in transformers have the order of such a model."""
MODEL_TYPES = tuple(sorted(_FAMILIES))
"""Those whose order is known."""
_OUTPUTS = ("lm_head.weight", "embed_out.weight")
_INPUTS = (".embed_tokens.weight", ".wte.weight", ".word_embeddings.weight", ".embed_in.weight")
"""Ends of the names of embeddings, below the model without its head."""
_WITH_HEAD = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes with an output matrix."""
_NUMBER = re.compile(r"(\d+)")


def family_of_type(model_type: object) -> Family | None:
    """The family of models of that type, of those whose order is known; None where it is none of them."""
    name = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return None if name is None else registry.family(name)


def in_model_order(names: Iterable[str], model_type: object) -> list[str] | None:
    """Names of parameters in the order of a model of that type; None where it is not known of all of them."""
    family = family_of_type(model_type)
    return None if family is None else family.in_order(names, "huggingface")


def by_number(names: Iterable[str]) -> list[str]:
    """Names in alphabetical order, numbers in them by value.

    >>> by_number(["h.10.w", "h.2.w", "e.w"])
    ['e.w', 'h.2.w', 'h.10.w']
    """
    return sorted(names, key=lambda name: [int(own) if at % 2 else own for at, own in enumerate(_NUMBER.split(name))])


def tied_output(names: Collection[str], config: Mapping[str, object]) -> tuple[str, str] | None:
    """The output matrix and the embedding that it is; None where the model is not tied, or not known to be.

    transformers saves such a matrix once, under the name of the embedding; older files hold it twice. Whether it is
    tied says config.json; a model for which it does not say so and whose class has an output matrix that the files
    lack is tied too, since transformers would else initialise it. The name of the output matrix may or may not be one
    of `names`.
    """
    inputs = [name for name in names if name.endswith(_INPUTS)]
    outputs = [name for name in _OUTPUTS if name in names]
    said = config.get("tie_word_embeddings")
    if len(inputs) != 1 or len(outputs) > 1 or said is False:
        return None
    if outputs:
        return (outputs[0], inputs[0]) if said is True else None
    classes = config.get("architectures")
    has_head = isinstance(classes, list) and any(str(own).endswith(_WITH_HEAD) for own in classes)
    return (_OUTPUTS[0], inputs[0]) if has_head else None
