"""Facts about a model: recorded arguments or config.json, order of the parameters, tied weights.

A checkpoint records arguments of the run that wrote it, or a Hugging Face configuration. No file of transformers
records the order of the parameters or which are tied.

Safetensors sorts tensors by name. But DeepSpeed's flat buffers and optimizers number parameters in the order in which
the model registers them. This module knows that order for the model types listed below: it is the order of
`named_parameters()` in transformers 4.28 to 5.23. Models with experts are left out, as transformers stacks experts in
memory.

>>> names = ["lm_head.weight", "model.norm.weight", "model.layers.10.mlp.up_proj.weight", "model.embed_tokens.weight",
...          "model.layers.2.mlp.up_proj.weight", "model.layers.2.self_attn.k_proj.weight"]
>>> for name in sort_in_model_order(names, "llama"):
...     print(name)
model.embed_tokens.weight
model.layers.2.self_attn.k_proj.weight
model.layers.2.mlp.up_proj.weight
model.layers.10.mlp.up_proj.weight
model.norm.weight
lm_head.weight
>>> sort_in_model_order(["model.surprise.weight"], "llama") is None
True
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ucp.contract.sidecars import list_sidecars
from ucp.core.index import Index
from ucp.errors import MalformedError
from ucp.io.files import read_object
from ucp.io.folder import exists, path_of
from ucp.io.pickle.values import Stub

if TYPE_CHECKING:
    from ucp.families.family import Family

CONFIG_EXTRA = "config"
"""Name of the extra that is a parsed config.json."""
_RUN_ARGUMENTS = ("args", "client_state/args")
_MODEL_ARGUMENTS = ("model_args", "client_state/model_args")
"""Names of extras: sizes of the model as nanoGPT saves them (`n_head`, `n_embd`, ...)."""
_CONFIG_FILE = "config.json"
_MOST_BYTES = 4 << 20
"""Longest config.json that is read."""


def recorded_arguments(index: Index) -> Mapping[str, object]:
    """Recorded sizes and settings of the model, under the names of the framework that recorded them.

    They come from config.json, from `model_args` (nanoGPT) and from the arguments of the run; of equal names, the last
    counts. Raises MalformedError for a config.json that is not JSON.
    """
    return {**_configuration(index), **_extra(index, _MODEL_ARGUMENTS), **run_arguments(index)}


def run_arguments(index: Index) -> Mapping[str, object]:
    """Arguments of the run, as Megatron-LM and Megatron-DeepSpeed save them (`args`); empty if there are none."""
    return _extra(index, _RUN_ARGUMENTS)


def read_config(folder: str) -> dict[str, object]:
    """Contents of the `config.json` in a folder; empty if there is none. Raises MalformedError."""
    path = os.path.join(folder, _CONFIG_FILE)
    return read_object(path) if exists(path) else {}


def parse_values(texts: Mapping[str, str]) -> dict[str, object]:
    """Values of arguments that a user wrote.

    >>> parse_values({"num_attention_heads": "32", "swiglu": "true", "moe_layer_freq": "[0,1]"})
    {'num_attention_heads': 32, 'swiglu': True, 'moe_layer_freq': [0, 1]}
    """
    return {name: _value_of(text) for name, text in texts.items()}


def _value_of(text: str) -> object:
    plain: Mapping[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    for kind in (int, float, json.loads):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _configuration(index: Index) -> Mapping[str, object]:
    for extra in index.extras:
        if extra.name == CONFIG_EXTRA and extra.rank is None:
            return _by_name(extra.value)
    file = next((sidecar.ref for sidecar in list_sidecars(index) if sidecar.name == _CONFIG_FILE), None)
    if file is None or file.codec or file.nbytes > _MOST_BYTES:
        return {}
    with path_of(file.path).open("rb") as stream:
        stream.seek(file.offset)
        text = stream.read(file.nbytes)
    try:
        return _by_name(json.loads(text))
    except ValueError as error:
        raise MalformedError(f"expected a configuration of a model (JSON) in {file.path}; {error}") from error


def _extra(index: Index, names: Collection[str]) -> dict[str, object]:
    """Entries of the first extra with one of these names that is of all ranks or of rank 0; empty if there is none."""
    for extra in index.extras:
        if extra.name in names and extra.rank in (None, 0):
            return _by_name(extra.value.state if isinstance(extra.value, Stub) else extra.value)
    return {}


def _by_name(value: object) -> dict[str, object]:
    return {key: entry for key, entry in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}


_FAMILIES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "smollm3"), "llama"),
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gpt2": "gpt",
    "bloom": "bloom",
    "gpt_neox": "gpt-neox",
}
"""`model_type` of a config.json to the model family with the parameter order of its class in transformers."""
MODEL_TYPES = tuple(sorted(_FAMILIES))
"""Model types whose parameter order is known."""
_OUTPUTS = ("lm_head.weight", "embed_out.weight")
_INPUTS = (".embed_tokens.weight", ".wte.weight", ".word_embeddings.weight", ".embed_in.weight")
"""Ends of the names of input embeddings, which belong to the base model (the model without its head)."""
_WITH_HEAD = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes with an output matrix."""
_NUMBER = re.compile(r"(\d+)")


def family_of_type(model_type: object) -> Family | None:
    """The family of models of that type; None if the parameter order of that type is not known."""
    name = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if name is None:
        return None
    from ucp.contract import registry  # imports this module

    return registry.family(name)


def sort_in_model_order(names: Iterable[str], model_type: object) -> list[str] | None:
    """Names of parameters in the order of a model of that type; None if the position of some is not known."""
    family = family_of_type(model_type)
    return None if family is None else family.sort_names(names, "huggingface")


def sort_by_number(names: Iterable[str]) -> list[str]:
    """Names in alphabetical order, numbers in them by value.

    >>> sort_by_number(["h.10.w", "h.2.w", "e.w"])
    ['e.w', 'h.2.w', 'h.10.w']
    """
    return sorted(names, key=lambda name: [*map(_order_piece, _NUMBER.split(name))])


def _order_piece(piece: str) -> tuple[int, str]:
    """Numbers by their length first: int() refuses those of more than 4,300 digits."""
    digits = piece.lstrip("0")
    return (len(digits), digits) if piece.isdecimal() else (0, piece)


def find_possible_tie(names: Collection[str], config: Mapping[str, object]) -> tuple[str, str] | None:
    """Names of the output matrix and of the embedding that it may be tied to, if nothing tells; else None.

    A model without an output matrix has none that could be tied: files of a base model, whose names lack the part
    before the first dot; and models with another head, whose names differ in that part.
    """
    guess = {"architectures": ["ForCausalLM"], **config, "tie_word_embeddings": True}
    pair = None if "tie_word_embeddings" in config else find_tied_output(names, guess)
    if pair is None:
        return None
    output, embedding = pair
    base = embedding.partition(".")[0] + "."
    return pair if output in names or all(name.startswith(base) for name in names) else None


def find_tied_output(names: Collection[str], config: Mapping[str, object]) -> tuple[str, str] | None:
    """Names of the output matrix and of the embedding that it is tied to; None if they are not known to be tied.

    transformers saves a tied matrix once, under the name of the embedding; older files hold it twice. config.json says
    whether it is tied. If the class of the model has an output matrix and the files lack it, it counts as tied unless
    config.json denies that, since transformers would otherwise initialise it at random. The name of the output matrix
    may or may not be one of `names`.
    """
    inputs = [name for name in names if name.endswith(_INPUTS)]
    outputs = [name for name in _OUTPUTS if name in names]
    is_tied = config.get("tie_word_embeddings")
    if len(inputs) != 1 or len(outputs) > 1 or is_tied is False:
        return None
    if outputs:
        return (outputs[0], inputs[0]) if is_tied is True else None
    classes = config.get("architectures")
    has_head = isinstance(classes, list) and any(str(name).endswith(_WITH_HEAD) for name in classes)
    return (_OUTPUTS[0], inputs[0]) if has_head else None
