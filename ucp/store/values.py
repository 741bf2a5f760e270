"""Plain values as JSON, and back, without losing their kind.

JSON has no tuple, no bytes, no infinity and only text keys. Those are written as an object with one key that starts
with "!"; everything else is itself.

>>> from_json(to_json({"betas": (0.9, 0.95), 1: None})) == {"betas": (0.9, 0.95), 1: None}
True
>>> to_json((1, 2))
{'!tuple': [1, 2]}
"""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from collections.abc import Iterable

from ucp.errors import MalformedError
from ucp.inert import GlobalName, TorchSize

__all__ = ["NotPlainError", "from_json", "to_json"]

_DEEPEST = 200
_MOST_BITS = 8192
"""Longest whole number that is written as digits; Python reads no more than 4300 of them."""


class NotPlainError(ValueError):
    """The value holds something that JSON cannot: an object, a tensor, a cycle."""


def to_json(value: object, depth: int = 0) -> object:
    """`value` in terms of JSON. Raises NotPlainError."""
    if depth > _DEEPEST:
        raise NotPlainError("nested too deeply, or in a cycle")
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int or isinstance(value, float | complex):
        return _number_to_json(value)
    if isinstance(value, bytes | bytearray):
        return {f"!{type(value).__name__}": base64.b64encode(value).decode()}
    if isinstance(value, GlobalName):
        return {"!global": [value.module, value.qualname]}
    if isinstance(value, dict):
        return _dict_to_json(value, depth + 1)
    if isinstance(value, list | tuple | set | frozenset) and type(value) in _SEQUENCES:
        return _sequence_to_json(value, depth + 1)
    raise NotPlainError(f"a {type(value).__name__} is not a plain value")


def _number_to_json(value: complex) -> object:
    if isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise NotPlainError(f"a number of {value.bit_length()} bits has too many digits")
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"!float": repr(value)}
    return {"!complex": [_number_to_json(value.real), _number_to_json(value.imag)]}


def _sequence_to_json(value: Iterable[object], depth: int) -> object:
    items = [to_json(item, depth) for item in value]
    if isinstance(value, set | frozenset):
        items.sort(key=json.dumps)  # the order of a set changes from run to run
    tag = _SEQUENCES[type(value)]
    return {tag: items} if tag else items


_SEQUENCES: dict[type, str] = {
    list: "",
    tuple: "!tuple",
    TorchSize: "!size",
    set: "!set",
    frozenset: "!frozenset",
}


def _dict_to_json(value: dict[object, object], depth: int) -> object:
    if getattr(value, "__dict__", None):
        raise NotPlainError("a dict that carries attributes")
    plain = all(isinstance(key, str) and not key.startswith("!") for key in value)
    if type(value) is dict and plain:
        return {key: to_json(item, depth) for key, item in value.items()}
    tag = "!ordered" if isinstance(value, OrderedDict) else "!dict"
    return {tag: [[to_json(key, depth), to_json(item, depth)] for key, item in value.items()]}


def from_json(value: object, depth: int = 0) -> object:
    """The value that `to_json` was given. Raises MalformedError for an unknown mark, or too deep a nesting."""
    if depth > 2 * _DEEPEST:
        raise MalformedError("expected a value marked as ucp marks them; got one nested too deeply")
    if isinstance(value, list):
        return [from_json(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("!"):
        return {key: from_json(item, depth + 1) for key, item in value.items()}
    ((tag, inner),) = value.items()
    try:
        return _marked(tag, inner, depth + 1)
    except (TypeError, ValueError, KeyError) as error:
        shown = repr(inner)[:200]
        raise MalformedError(f"expected a value marked as ucp marks them; got {tag!r}: {shown}") from error


def _marked(tag: str, inner: object, depth: int) -> object:
    match tag, inner:
        case "!float", str():
            return float(inner)
        case "!complex", [real, imag]:
            return complex(float(str(from_json(real, depth))), float(str(from_json(imag, depth))))
        case "!bytes", str():
            return base64.b64decode(inner, validate=True)
        case "!bytearray", str():
            return bytearray(base64.b64decode(inner, validate=True))
        case "!global", [str(module), str(qualname)]:
            return GlobalName(module, qualname)
        case (("!dict" | "!ordered"), list()):
            pairs = [(from_json(key, depth), from_json(item, depth)) for key, item in inner]
            return OrderedDict(pairs) if tag == "!ordered" else dict(pairs)
        case _, list():
            kind = {mark: kind for kind, mark in _SEQUENCES.items()}[tag]
            return kind(from_json(item, depth) for item in inner)
        case _:
            raise KeyError(tag)
