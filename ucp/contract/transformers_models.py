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

__all__ = ["MODEL_TYPES", "by_number", "in_model_order", "tied_output"]

_LLAMA = (
    "model lm_head embed_tokens layers norm self_attn mlp input_layernorm post_attention_layernorm "
    "pre_feedforward_layernorm post_feedforward_layernorm q_proj k_proj "
    "v_proj o_proj qkv_proj q_norm k_norm gate_proj up_proj gate_up_proj down_proj weight bias"
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
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "llama", "mistral"), _LLAMA),
    **dict.fromkeys(("olmo2", "phi3", "qwen2", "qwen3", "smollm3"), _LLAMA),
    "gpt2": _GPT2,
    "bloom": _BLOOM,
    "gpt_neox": _NEOX,
}
"""`model_type` of a config.json to the modules of such a model, those of one module in their order."""
MODEL_TYPES = tuple(sorted(_MODULES))
"""Those whose order is known."""
_OUTPUTS = ("lm_head.weight", "embed_out.weight")
_INPUTS = (".embed_tokens.weight", ".wte.weight", ".word_embeddings.weight", ".embed_in.weight")
"""Ends of the names of embeddings, below the model without its head."""
_WITH_HEAD = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes with an output matrix."""
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
