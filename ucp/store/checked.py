"""Values of a JSON document that may say anything, each checked to be of the kind it has to be; else TypeError.

>>> as_ints([2, 3])
(2, 3)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

__all__ = [
    "Json",
    "as_int",
    "as_ints",
    "as_list",
    "as_object",
    "as_text",
    "as_texts",
    "as_texts_by_name",
    "of_kind",
]

Json = Mapping[str, object]
T = TypeVar("T")


def of_kind(value: object, kind: type[T]) -> T:
    """`value`, which is of that type."""
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {value!r}"[:200])
    return value


def as_object(value: object) -> Json:
    """`value`, an object of JSON."""
    return of_kind(value, dict)


def as_list(value: object) -> list[object]:
    """`value`, a list."""
    return of_kind(value, list)


def as_text(value: object) -> str:
    """`value`, a text."""
    return of_kind(value, str)


def as_int(value: object, *, least: int = 0) -> int:
    """`value`, a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise TypeError(f"expected a whole number of at least {least}, got {value!r}"[:200])
    return value


def as_ints(value: object) -> tuple[int, ...]:
    """A list of whole numbers."""
    return tuple(map(as_int, as_list(value)))


def as_texts(value: object) -> tuple[str, ...]:
    """A list of texts."""
    return tuple(map(as_text, as_list(value)))


def as_texts_by_name(value: object) -> dict[str, str]:
    """An object whose values are texts."""
    return {name: as_text(item) for name, item in as_object(value).items()}
