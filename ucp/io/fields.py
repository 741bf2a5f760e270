"""Typed access to what a pickle said: each function gives the value or says what stands there instead.

>>> integer("4", "partition_count of a.pt")
Traceback (most recent call last):
ucp.errors.MalformedError: expected a whole number for partition_count of a.pt; got a str ('4')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from ucp.errors import MalformedError
from ucp.inert import GlobalName, Stub
from ucp.tensor import TensorRef

__all__ = ["Shape", "described", "integer", "mapping", "sequence", "shapes", "tensor", "text"]

Shape = tuple[int, ...]


def described(value: object) -> str:
    """Kind of a value, and the value where it is short."""
    match value:
        case TensorRef():
            return f"a tensor of {value.dtype} {list(value.shape)}"
        case Stub():
            return f"an object of {value.made_by}"
        case GlobalName():
            return f"the name {value}"
        case None:
            return "None"
        case bool() | int() | float() | str() if len(repr(value)) <= 60:
            return f"a {type(value).__name__} ({value!r})"
    return f"a {type(value).__name__}"


def _wrong(expected: str, where: str, value: object) -> NoReturn:
    raise MalformedError(f"expected {expected} for {where}; got {described(value)}")


def mapping(value: object, where: str) -> Mapping[object, object]:
    """`value`, which is a dict."""
    if not isinstance(value, dict):
        _wrong("a dict", where, value)
    return value


def sequence(value: object, where: str) -> Sequence[object]:
    """`value`, which is a list or tuple."""
    if not isinstance(value, list | tuple):
        _wrong("a list", where, value)
    return value


def integer(value: object, where: str) -> int:
    """`value`, which is an int and no bool."""
    if not isinstance(value, int) or isinstance(value, bool):
        _wrong("a whole number", where, value)
    return value


def text(value: object, where: str) -> str:
    """`value`, which is a str."""
    if not isinstance(value, str):
        _wrong("a text", where, value)
    return value


def tensor(value: object, where: str) -> TensorRef:
    """`value`, which is a tensor."""
    if not isinstance(value, TensorRef):
        _wrong("a tensor", where, value)
    return value


def shapes(value: object, where: str) -> dict[str, Shape]:
    """Name to shape, in order."""
    found: dict[str, Shape] = {}
    for name, shape in mapping(value, where).items():
        sizes = sequence(shape, f"the shape of {name!r} in {where}")
        if not all(type(n) is int and n >= 0 for n in sizes):
            _wrong("sizes", f"{name!r} in {where}", shape)
        found[text(name, f"a name in {where}")] = tuple(int(n) for n in sizes if isinstance(n, int))
    return found
