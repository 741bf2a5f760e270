"""What a user says about the run with `--set NAME=VALUE`: arguments of Megatron, checked before they are written.

A wrong argument is worse than none: Megatron takes the model from them (`--use-checkpoint-args`), and so does `ucp`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches

from ucp.errors import MalformedError, UsageError, listed
from ucp.io.pickle.fields import shown
from ucp_formats.megatron.run.arguments import KNOWN, read_arguments

__all__ = ["check_settings", "settings_of"]

_ALIKE = 0.9
"""Similarity from which a name that is not known counts as a slip of the pen (difflib's ratio)."""


def settings_of(texts: Mapping[str, str]) -> dict[str, object]:
    """Values of arguments that a user wrote.

    >>> settings_of({"num_attention_heads": "32", "swiglu": "true", "moe_layer_freq": "[0,1]"})
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


def check_settings(asked: Mapping[str, object], recorded: Mapping[str, object]) -> tuple[str, ...]:
    """Notes on settings that a source with arguments (`recorded`) does not have.

    Raises UsageError naming all that are misspelt, or of another kind than what was recorded.
    """
    known = {*recorded, *KNOWN}
    strange = [name for name in asked if name not in known]
    wrong = [
        *(f"{name}: did you mean {near}?" for name in strange if (near := _near(name, known))),
        *(f"{name}: {value} is below 0" for name, value in asked.items() if name in KNOWN and _is_negative(value)),
        *(f"{name}: {text}" for name, value in asked.items() if (text := _other_kind(value, recorded.get(name)))),
    ]
    if wrong:
        raise UsageError(f"expected arguments of Megatron with --set; got\n{listed(wrong)}")
    try:
        read_arguments(dict(asked), "--set")
    except MalformedError as error:
        raise UsageError(str(error)) from error
    new = [name for name in strange if recorded]
    return (f"--set {', '.join(new)}: the source records no such argument; written as it stands",) if new else ()


def _is_negative(value: object) -> bool:
    return isinstance(value, int) and value < 0


def _near(name: str, known: Collection[str]) -> str:
    return " or ".join(get_close_matches(name, known, 2, _ALIKE))


def _other_kind(value: object, recorded: object) -> str:
    """What is wrong with a value beside the one that was recorded; empty when nothing is."""
    if value is None or not isinstance(recorded, bool | int | float | str | list | tuple):
        return ""
    alike = {float: (int, float), tuple: (list,)}.get(type(recorded), (type(recorded),))
    return "" if type(value) in alike else f"{value!r}, and the source has {shown(recorded)}"
