"""Values of a checkpoint, which may be anything, as JSON or as one line of text."""

from __future__ import annotations

from collections.abc import Mapping

from ucp.inert import GlobalName, Stub
from ucp.store.values import NotPlainError, to_json
from ucp.tensor import InlineTensor, TensorRef
from ucp_cli.units import count_text, plural, shape_text

__all__ = ["brief", "json_value"]

_LONGEST = 60
"""Characters of a value that is shown whole."""


def json_value(value: object) -> object:
    """`value` as JSON, marked as in the extras of an atom store; a text in brackets where it is not plain."""
    try:
        return to_json(value)
    except NotPlainError:
        return f"<{brief(value)}>"


def brief(value: object) -> str:
    """What `value` is, in a few words.

    >>> brief({"last_epoch": 3, "base_lrs": [0.1]}), brief((0.9, 0.95)), brief(b"abcd")
    ('dict: last_epoch, base_lrs', '(0.9, 0.95)', '4 bytes')
    """
    match value:
        case TensorRef() | InlineTensor():
            return f"tensor {shape_text(value.shape)} {value.dtype}"
        case Stub():
            return f"object of {value.made_by}"
        case GlobalName():
            return str(value)
        case bytes() | bytearray():
            return plural(len(value), "byte")
        case dict():
            return _keys(value)
    text = repr(value)
    if len(text) <= _LONGEST and not isinstance(value, list | tuple | set | frozenset):
        return text
    match value:
        case str():
            return f"text of {plural(len(value), 'character')}"
        case list() | tuple() | set() | frozenset():
            plain = all(item is None or isinstance(item, bool | int | float | str) for item in value)
            return text if plain and len(text) <= _LONGEST else f"{type(value).__name__} of {count_text(len(value))}"
    return f"{text[: _LONGEST - 3]}..."


def _keys(value: Mapping[object, object]) -> str:
    shown = [str(key) for key in list(value)[:6]]
    more = f", ... ({len(value)} in all)" if len(value) > len(shown) else ""
    return f"dict: {', '.join(shown)}{more}" if value else "dict, empty"
