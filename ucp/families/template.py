"""Name templates: a parameter name with numbers left open.

`{layer}` stands for a whole number, `{layer+3}` for one that is 3 larger than the field, in a style that counts other
modules too. Names that differ only in numbers have the same `outline`, by which their template is found quickly.

>>> Template("decoder.layers.{layer}.mlp.linear_fc1.weight").fields_in("decoder.layers.7.mlp.linear_fc1.weight")
{'layer': 7}
>>> Template("{layer+3}.mlp.dense.weight").filled({"layer": 0})
'3.mlp.dense.weight'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

MOST_SHIFT = 999_999
"""Largest number by which a field may be shifted."""

_FIELD = re.compile(r"\{([a-z_]+)(?:\+(\d{1,6}))?\}")
"""Examples: {layer}, {expert}, {layer+3}."""

_NUMBER = "(0|[1-9][0-9]{0,8})"
"""A number as frameworks write it: no sign, no leading zero."""

_COUNT = re.compile(r"\.[0-9]+(?=\.)")
"""A segment of a name that is a number, except the first: a number at the start tells the kind of module."""

_DIGITS = re.compile(r"[0-9]+")


@lru_cache(maxsize=1 << 17)  # names of one model are looked up again and again
def outline(name: str) -> str:
    """The name with `#` for every number: equal for all names that one template can stand for.

    >>> outline("layers.12.linear_fc1.weight")
    'layers.#.linear_fc#.weight'
    """
    return _DIGITS.sub("#", name)


def kind(name: str) -> str:
    """The name with `#` for numbers that count layers or experts: names of one kind fall under the same rules.

    >>> kind("layers.12.linear_fc1.weight7")
    'layers.#.linear_fc1.weight7'
    """
    return _COUNT.sub(".#", name)


@dataclass(frozen=True, slots=True)
class Template:
    """A name with numbered fields. Raises ValueError for braces that are not a field, or a field that occurs twice."""

    text: str
    """As it was written."""
    fields: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """Names of the fields, in order."""
    outline: str = field(init=False, compare=False, repr=False)
    """What `outline` gives for every name that it stands for."""
    _shifts: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for attribute, value in zip(("fields", "outline", "_shifts"), _parsed(self.text), strict=True):
            object.__setattr__(self, attribute, value)

    def fields_in(self, name: str) -> dict[str, int] | None:
        """Field to number, or None when the template does not stand for `name`."""
        match = _pattern(self.text).fullmatch(name)
        if match is None:
            return None
        numbers = [int(digits) - shift for digits, shift in zip(match.groups(), self._shifts, strict=True)]
        return dict(zip(self.fields, numbers, strict=True)) if not numbers or min(numbers) >= 0 else None

    def filled(self, fields: Mapping[str, int]) -> str:
        """The name with these numbers; fields without a number stay open.

        >>> Template("layers.{layer}.experts.{expert}.weight").filled({"layer": 2})
        'layers.2.experts.{expert}.weight'
        """

        def number(match: re.Match[str]) -> str:
            field, shift = match.groups()
            return str(fields[field] + int(shift or 0)) if field in fields else match.group()

        return _FIELD.sub(number, self.text)

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[Template], tuple[str]]:
        return Template, (self.text,)


@lru_cache(maxsize=1 << 14)
def _parsed(text: str) -> tuple[tuple[str, ...], str, tuple[int, ...]]:
    """Fields, outline and shifts of a template."""
    literals = _FIELD.split(text)[::3]
    fields = tuple(name for name, _ in _FIELD.findall(text))
    shifts = tuple(int(shift or 0) for _, shift in _FIELD.findall(text))
    if any("{" in literal or "}" in literal for literal in literals):
        raise ValueError(f"expected fields like {{layer}} or {{layer+3}}; got {text!r}")
    if len(set(fields)) < len(fields):
        raise ValueError(f"a field occurs twice in {text!r}")
    return fields, outline(_FIELD.sub("0", text)), shifts


@lru_cache(maxsize=1 << 14)
def _pattern(text: str) -> re.Pattern[str]:
    """Regular expression for the names of a template, made on first use: few templates of a family are ever used."""
    return re.compile(_NUMBER.join(map(re.escape, _FIELD.split(text)[::3])))
