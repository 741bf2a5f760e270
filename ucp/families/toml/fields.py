"""Typed values out of a parsed TOML document; a mistake is named with its place: `my.toml: rule[2]: expected ...`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ucp.errors import UsageError
from ucp.families.expression import Expression, ExpressionError
from ucp.families.rule import OptionValue
from ucp.families.template import LONGEST, Template

__all__ = [
    "Place",
    "dim_of",
    "document_of",
    "expression_of",
    "flag_of",
    "int_of",
    "items_of",
    "number_of",
    "numbers_of",
    "one_option_of",
    "only",
    "option_of",
    "table_of",
    "tables_of",
    "template_of",
    "text_of",
    "texts_of",
]

_SHOWN = 200
"""Characters of a value that a message shows."""

_MOST_NUMBER = 1 << 63
"""Bound of whole numbers in TOML."""

_MOST_DIMS = 64
"""Dims that a tensor of torch may have."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a file something stands, for messages."""

    path: str
    """File, keys and numbers of tables, e.g. "my.toml: rule[2]: tp"."""

    def at(self, key: str | int) -> Place:
        """The place of an entry in it."""
        return Place(f"{self.path}[{key}]" if isinstance(key, int) else f"{self.path}: {key}")

    def wrong(self, wanted: str, value: object) -> UsageError:
        """The error that says what was expected here."""
        return UsageError(f"{self.path}: expected {wanted}; got {_told(value)}")


def _told(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return (
            "a number of thousands of digits" if isinstance(value, int) else "one with a number of thousands of digits"
        )
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _toml_error(error: tomllib.TOMLDecodeError) -> str:
    """Where a file stops being TOML, and why: Python's message is the reason with the place in brackets."""
    reason, _, place = str(error).rpartition(" (at ")
    where = f"at {place.removesuffix(')')}" if reason else "somewhere"
    return (
        f"it goes wrong {where}: {(reason or str(error)).lower()}. Mend it there; docs/reference/families.md says what "
        "a rules file holds"
    )


@lru_cache(maxsize=256)
def document_of(text: str, source: str) -> Mapping[str, object]:
    """The TOML document that `text` is. Raises UsageError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: expected a TOML file of rules; {_toml_error(error)}") from error
    except RecursionError:
        raise UsageError(f"{source}: expected a TOML file of rules; it is nested too deeply to be read") from None
    except ValueError:
        raise UsageError(f"{source}: expected a TOML file of rules; a number in it has thousands of digits") from None


def tables_of(document: Mapping[str, object], key: str, place: Place) -> Iterable[tuple[int, object]]:
    """Tables under `[[key]]`, with their numbers."""
    value = document.get(key, [])
    if not isinstance(value, list):
        raise place.at(key).wrong(f"tables under [[{key}]]", value)
    return enumerate(value)


def table_of(value: object, place: Place) -> Mapping[str, object]:
    """The value as a table."""
    if not isinstance(value, dict):
        raise place.wrong("a table", value)
    return value


def items_of(value: object, place: Place) -> Sequence[object]:
    """The value as a list."""
    if not isinstance(value, list):
        raise place.wrong("a list", value)
    return value


def only(table: Mapping[str, object], known: frozenset[str], place: Place) -> None:
    """Refuse keys that mean nothing."""
    unknown = sorted(set(table) - known)
    if unknown:
        raise place.wrong(f"only {', '.join(sorted(known))}", unknown)


def text_of(value: object, place: Place) -> str:
    """The value as a text."""
    if not isinstance(value, str):
        raise place.wrong("a text", value)
    return value


def texts_of(value: object, place: Place) -> tuple[str, ...]:
    """The value as a list of texts."""
    return tuple(text_of(own, place.at(at)) for at, own in enumerate(items_of(value, place)))


def number_of(value: object, place: Place) -> int:
    """The value as a whole number, which is one of 64 bits as everywhere in TOML."""
    if not isinstance(value, int) or isinstance(value, bool) or not -_MOST_NUMBER <= value < _MOST_NUMBER:
        raise place.wrong("a whole number", value)
    return value


def dim_of(value: object, place: Place) -> int:
    """The value as the number of a dim, counted from 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value not in range(_MOST_DIMS):
        raise place.wrong("the number of a dim", value)
    return value


def int_of(value: int, place: Place) -> int:
    """The value as a whole number; true and false are 1 and 0."""
    return int(value) if isinstance(value, bool) else number_of(value, place)


def numbers_of(value: object, place: Place) -> dict[str, int]:
    """The value as a table of whole numbers; true and false are 1 and 0."""
    found = {}
    for name, own in table_of(value, place).items():
        found[name] = int_of(own, place.at(name)) if isinstance(own, int) else number_of(own, place.at(name))
    return found


def flag_of(value: object, place: Place) -> bool:
    """The value as true or false."""
    if not isinstance(value, bool):
        raise place.wrong("true or false", value)
    return value


def expression_of(value: object, place: Place) -> Expression:
    """The value as an expression."""
    try:
        return Expression(str(int_of(value, place)) if isinstance(value, int) else text_of(value, place))
    except ExpressionError as error:
        raise UsageError(f"{place.path}: {error}") from error


def template_of(value: object, place: Place) -> Template:
    """The value as a name template."""
    text = text_of(value, place)
    if len(text) > LONGEST:
        raise place.wrong(f"a name of at most {LONGEST} characters", text)
    try:
        return Template(text)
    except ValueError as error:
        raise UsageError(f"{place.path}: {error}") from error


def option_of(value: object, place: Place) -> OptionValue:
    """The value as an option of a pattern: a number, an expression, or a list of these."""
    if isinstance(value, list):
        return tuple(one_option_of(own, place.at(at)) for at, own in enumerate(value))
    return one_option_of(value, place)


def one_option_of(value: object, place: Place) -> int | Expression:
    """The value as a whole number or an expression."""
    return int_of(value, place) if isinstance(value, int) else expression_of(value, place)
