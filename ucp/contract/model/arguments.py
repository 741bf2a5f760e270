"""What a checkpoint records of its model: arguments of the run that wrote it, or a Hugging Face configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping

from ucp.contract.companions import companions_of
from ucp.core.index import Index
from ucp.core.pickle_values import Stub
from ucp.errors import MalformedError
from ucp.io.folder import is_there, path_of
from ucp.io.json_text import read_object

__all__ = ["CONFIG_EXTRA", "config_in", "recorded_arguments", "run_arguments", "said_values"]

CONFIG_EXTRA = "config"
"""Name of the extra that is a parsed config.json."""
_RUN_ARGUMENTS = ("args", "client_state/args")
_MODEL_ARGUMENTS = ("model_args", "client_state/model_args")
"""Names of extras: sizes of the model as nanoGPT saves them (`n_head`, `n_embd`, ...)."""
_CONFIG_FILE = "config.json"
_MOST_BYTES = 4 << 20
"""Longest config.json that is read."""


def recorded_arguments(index: Index) -> Mapping[str, object]:
    """Sizes and settings of the model, by the names of whoever recorded them; empty where nobody did.

    Those of config.json, before them those of the model (`model_args` of nanoGPT), and before these those of the run.
    Raises MalformedError for a config.json that is none.
    """
    return {**_configuration(index), **_extra(index, _MODEL_ARGUMENTS), **run_arguments(index)}


def run_arguments(index: Index) -> Mapping[str, object]:
    """Arguments of the run, as Megatron-LM and Megatron-DeepSpeed save them (`args`); empty where there are none."""
    return _extra(index, _RUN_ARGUMENTS)


def config_in(folder: str) -> dict[str, object]:
    """What `config.json` in a folder says; nothing where there is none. Raises MalformedError."""
    path = os.path.join(folder, _CONFIG_FILE)
    return read_object(path) if is_there(path) else {}


def said_values(texts: Mapping[str, str]) -> dict[str, object]:
    """Values of arguments that a user wrote.

    >>> said_values({"num_attention_heads": "32", "swiglu": "true", "moe_layer_freq": "[0,1]"})
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
    file = next((own.ref for own in companions_of(index) if own.name == _CONFIG_FILE), None)
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
    """Entries of the first extra with one of these names, of all ranks or the first; empty where there is none."""
    for extra in index.extras:
        if extra.name in names and extra.rank in (None, 0):
            return _by_name(extra.value.state if isinstance(extra.value, Stub) else extra.value)
    return {}


def _by_name(value: object) -> dict[str, object]:
    return {key: own for key, own in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}
