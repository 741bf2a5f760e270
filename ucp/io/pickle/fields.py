"""Checked access to unpickled values: `require_*` returns the value, or raises MalformedError with what it got.

>>> require_integer("4", "partition_count of a.pt")
Traceback (most recent call last):
ucp.errors.MalformedError: expected a whole number for partition_count of a.pt; got a str ('4')
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NoReturn

from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError
from ucp.io.pickle.values import GlobalName, Stub

Shape = tuple[int, ...]

_LONGEST = 60
"""Characters of a value in a message."""

_DEEPEST = 100
"""Most nested dicts whose keys are joined."""


def describe_value(value: object) -> str:
    """Type of a value, and the value itself if it is short."""
    match value:
        case TensorRef():
            return f"a tensor of {value.dtype} {list(value.shape)}"
        case Stub():
            return f"an object of {value.made_by}"
        case GlobalName():
            return f"the name {value}"
        case None:
            return "None"
    require_text = format_short(value)
    return f"a {type(value).__name__} ({require_text})" if require_text else f"a {type(value).__name__}"


def format_short(value: object, most: int = _LONGEST) -> str:
    """A number, text or None as Python prints it; empty for other types and for more than `most` characters.

    >>> format_short(0.1), format_short("text", 4), format_short([])
    ('0.1', '', '')
    """
    if isinstance(value, int) and value.bit_length() > 4 * most:  # Python does not print thousands of digits
        return ""
    cut = value[: most + 1] if isinstance(value, str) else value
    text = repr(cut) if cut is None or isinstance(cut, bool | int | float | str) else ""
    return text if len(text) <= most else ""


def format_short_members(value: Collection[object], most: int = _LONGEST) -> str:
    """A list, tuple or set of such values as Python prints it; empty if it takes more than `most` characters."""
    if len(value) > most or not all(format_short(item, most) for item in value):
        return ""
    text = repr(value)
    return text if len(text) <= most else ""


def format_value(value: object) -> str:
    """A value on one line: as Python prints it if it is short, else its type.

    >>> format_value((0.9, 0.95)), format_value([[]])
    ('(0.9, 0.95)', 'a list')
    """
    members = format_short_members(value) if isinstance(value, list | tuple | set | frozenset) else ""
    return members or format_short(value) or describe_value(value)


def _refuse(expected: str, where: str, value: object) -> NoReturn:
    raise MalformedError(f"expected {expected} for {where}; got {describe_value(value)}")


def require_mapping(value: object, where: str) -> Mapping[object, object]:
    """`value` as a dict. Raises MalformedError."""
    if not isinstance(value, dict):
        _refuse("a dict", where, value)
    return value


def flatten(saved: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    """Values in nested dicts, by their keys joined with dots.

    A dict that is nested too deeply, or was visited before (a cycle), counts as a value.

    >>> list(flatten({"layer": {"weight": 1, "bias": {}}, "step": 2}))
    [('layer.weight', 1), ('step', 2)]
    """
    met = set[int]()

    def below(items: Mapping[object, object], prefix: str, depth: int) -> Iterator[tuple[str, object]]:
        met.add(id(items))
        for key, value in items.items():
            if isinstance(value, dict) and id(value) not in met and depth < _DEEPEST:
                yield from below(value, f"{prefix}{key}.", depth + 1)
            elif not isinstance(value, dict) or value:
                yield f"{prefix}{key}", value

    return below(saved, "", 1)


def require_sequence(value: object, where: str) -> Sequence[object]:
    """`value` as a list or tuple. Raises MalformedError."""
    if not isinstance(value, list | tuple):
        _refuse("a list", where, value)
    return value


def require_integer(value: object, where: str) -> int:
    """`value` as an int; a bool does not count as one. Raises MalformedError."""
    if not isinstance(value, int) or isinstance(value, bool):
        _refuse("a whole number", where, value)
    return value


def text(value: object, where: str) -> str:
    """`value` as a str. Raises MalformedError."""
    if not isinstance(value, str):
        _refuse("a text", where, value)
    return value


def require_tensor(value: object, where: str) -> TensorRef:
    """`value` as a tensor. Raises MalformedError."""
    if not isinstance(value, TensorRef):
        _refuse("a tensor", where, value)
    return value


def require_shapes(value: object, where: str) -> dict[str, Shape]:
    """Names to shapes, in order. Raises MalformedError."""
    shape_by_name: dict[str, Shape] = {}
    for name, shape in require_mapping(value, where).items():
        sizes = require_sequence(shape, f"the shape of {name!r} in {where}")
        if not all(type(n) is int and n >= 0 for n in sizes):
            _refuse("sizes", f"{name!r} in {where}", shape)
        shape_by_name[text(name, f"a name in {where}")] = tuple(int(n) for n in sizes if isinstance(n, int))
    return shape_by_name
