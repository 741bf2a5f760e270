"""Encodes plain values as JSON, and decodes them to values of the same types.

JSON has no tuples, bytes or infinities, and only text keys. Such values become an object with one key that starts with
"!"; all others are written unchanged.

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
from collections.abc import Callable

from ucp.errors import MalformedError
from ucp.io.pickle.keys import check_keys
from ucp.io.pickle.values import GlobalName, TorchSize

_DEEPEST = 100
"""The deepest nesting that is written."""
_DEEPEST_READ = 200
"""The deepest nesting that is read."""
_MOST_NBYTES = 1 << 20
"""The most bytes of JSON, approximately. A larger value is kept as a pickle: JSON repeats an object that a value holds
several times, a pickle does not."""
_MOST_BITS = 8192
"""The longest integer that is written as digits; Python reads at most 4300 digits."""


class NotPlainError(ValueError):
    """The value contains something that JSON cannot hold (an object, a tensor, a cycle), or is too large."""


def to_json(value: object) -> object:
    """Encode `value` for JSON. Raises NotPlainError."""
    return PlainJson(_refuse, _refuse_more).of(value)


def is_plain(value: object) -> bool:
    """Whether `to_json` can encode `value`: it is small, without cycles, and contains neither objects nor tensors."""
    try:
        to_json(value)
    except NotPlainError:
        return False
    return True


def _refuse(value: object) -> object:
    raise NotPlainError(f"a {type(value).__name__} is not a plain value, or has too many digits")


def _refuse_more(value: object) -> object:
    raise NotPlainError("nested too deeply, in a cycle, or too large")


class PlainJson:
    """Encodes values for JSON.

    `other` encodes values that are not plain, and may encode their parts. `cut` encodes values that are nested too
    deeply or exceed the size limit.
    """

    def __init__(self, other: Callable[[object], object], cut: Callable[[object], object]) -> None:
        self._other = other
        self._cut = cut
        self._depth = 0
        self._room = _MOST_NBYTES

    def of(self, value: object) -> object:
        """`value` encoded for JSON."""
        # bytes of JSON, approximately; of a container, without its contents
        nbytes = len(value) if isinstance(value, str | bytes | bytearray) else 8
        nbytes += value.bit_length() // 3 if isinstance(value, int) else 0
        self._room -= nbytes + self._depth
        if self._room < 0 or self._depth > _DEEPEST:
            return self._cut(value)
        self._depth += 1
        put = self._put(value)
        self._depth -= 1
        return put

    def _put(self, value: object) -> object:
        match value:
            case None | bool() | str():
                return value
            case int() if value.bit_length() <= _MOST_BITS:
                return value
            case float():
                return value if math.isfinite(value) else {"!float": repr(value)}
            case complex():
                return {"!complex": [self.of(value.real), self.of(value.imag)]}
            case bytes() | bytearray():
                return {f"!{type(value).__name__}": base64.b64encode(value).decode()}
            case GlobalName():
                return {"!global": [value.module, value.qualname]}
            case dict() if not getattr(value, "__dict__", None):
                if type(value) is dict and all(isinstance(key, str) and not key.startswith("!") for key in value):
                    return {key: self.of(item) for key, item in value.items()}
                tag = "!ordered" if isinstance(value, OrderedDict) else "!dict"
                return {tag: [[self.of(key), self.of(item)] for key, item in value.items()]}
            case list() | tuple() | set() | frozenset() if type(value) in _SEQUENCES:
                items = [*map(self.of, value)]
                if isinstance(value, set | frozenset):
                    items.sort(key=json.dumps)  # the order of a set differs from run to run
                return {_SEQUENCES[type(value)]: items} if type(value) is not list else items
        return self._other(value)


_SEQUENCES: dict[type, str] = {
    list: "",
    tuple: "!tuple",
    TorchSize: "!size",
    set: "!set",
    frozenset: "!frozenset",
}


def from_json(value: object, depth: int = 0) -> object:
    """The value that `to_json` encoded. Raises MalformedError for an unknown "!" key, or nesting that is too deep."""
    if depth > _DEEPEST_READ:
        raise MalformedError(f"expected a value as ucp encodes it; got one nested more than {_DEEPEST_READ} deep")
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
        raise MalformedError(f"expected a value as ucp encodes it; got {tag!r}: {shown}") from error


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
            check_keys(key for key, _ in pairs)
            return OrderedDict(pairs) if tag == "!ordered" else dict(pairs)
        case _, list():
            kind = {mark: kind for kind, mark in _SEQUENCES.items()}[tag]
            items = [from_json(item, depth) for item in inner]
            if kind in (set, frozenset):
                check_keys(items)
            return kind(items)
        case _:
            raise KeyError(tag)
