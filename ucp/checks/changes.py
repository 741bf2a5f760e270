"""Shows differences between two checkpoints as tables; the same difference in many numbered layers is one row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ucp.core.text.page import Part, Section, facts, table
from ucp.core.text.units import count_text, ranges_text
from ucp.errors import format_count
from ucp.transfer.differences import Change

_NUMBER = re.compile(r"(?<![^.])[0-9]{1,18}(?![^.])")
"""A part of a name that is a number, such as 12 in layers.12.mlp.weight."""


@dataclass(slots=True)
class _Row:
    """Changes that are shown on one line."""

    first: Change
    """The first of the changes."""
    changes: int = 0
    """How many changes there are."""
    numel: int = 0
    """Number of elements that differ, in all changes together."""
    largest: float = 0.0
    """The largest difference; NaN counts as larger than any number."""
    numbers: list[set[int]] = field(default_factory=list)
    """For each number in the name, the values that it has in the changes."""

    def add(self, change: Change) -> None:
        self.changes += 1
        self.numel += change.numel
        if math.isnan(change.largest) or change.largest > self.largest:
            self.largest = change.largest
        here = [int(number) for number in _NUMBER.findall(change.param)]
        self.numbers = self.numbers or [set() for _ in here]
        for seen, number in zip(self.numbers, here, strict=False):
            seen.add(number)

    @property
    def label(self) -> str:
        """The name; of several changes, with "#" for numbers, followed by the values of each."""
        if self.changes == 1:
            return self.first.param
        ranges = (f"  [{ranges_text(sorted(numbers))}]" for numbers in self.numbers)
        return "".join((_NUMBER.sub("#", self.first.param), *ranges))

    @property
    def times(self) -> str:
        """Number of parameters on the line, such as "×3"; empty for one."""
        return f"×{self.changes}" if self.changes > 1 else ""


_MOST_ROWS = 20
"""The most rows of a table, so that important rows are not lost among hundreds."""


def _short_table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Section:
    return table(title, columns, rows, most=_MOST_ROWS, all_in="--json lists all (in Python: `changes`)")


def make_tables(changes: Sequence[Change], *, a: str, b: str) -> Iterator[Part]:
    """Tables of differences by kind; nothing if there are none. `a`, `b`: the names of the two checkpoints."""
    if not changes:
        return
    values = [change for change in changes if change.what == "values"]
    hyper = [change for change in changes if change.what == "group"]
    extras = [(c.param.removeprefix("extra/"), c.state, c.a, c.b) for c in changes if c.what == "extra"]
    others = [change for change in changes if change.what not in {"values", "group", "extra"}]
    structure = [
        (row.label, row.times, row.first.state, row.first.what, row.first.a, row.first.b)
        for row in _group_rows(others, lambda change: (*_similarity(change), change.a, change.b))
    ]
    settings = [
        (row.first.state or row.label, row.first.a, row.first.b, format_count(row.changes, "parameter"))
        for row in _group_rows(hyper, lambda change: (change.state or _similarity(change), change.a, change.b))
    ]
    by_state = [
        (row.first.state, count_text(row.changes), count_text(row.numel), f"{row.largest:.3g}")
        for row in _group_rows(values, lambda change: change.state)
    ]
    by_parameter = [
        (row.label, row.times, row.first.state, count_text(row.numel), f"{row.largest:.3g}")
        for row in _group_rows(values, _similarity)
    ]
    yield ""
    yield facts([("a", a), ("b", b)])
    yield _short_table("Structure", ("parameter", ">", "state", "differs in", "a", "b"), structure)
    yield _short_table("Hyper-parameters", ("name", "a", "b", "of"), settings)
    yield _short_table("Extras", ("extra", "entry", "a", "b"), extras)
    yield _short_table("Values, by state", ("state", ">tensors", ">elements", ">largest"), by_state)
    yield _short_table("Values, by parameter", ("parameter", ">", "state", ">elements", ">largest"), by_parameter)


def _group_rows(changes: Iterable[Change], key: Callable[[Change], object]) -> list[_Row]:
    rows: dict[object, _Row] = {}
    for change in changes:
        rows.setdefault(key(change), _Row(change)).add(change)
    return list(rows.values())


def _similarity(change: Change) -> tuple[str, str, str]:
    """A key that is equal for the same change in different numbered layers."""
    return _NUMBER.sub("#", change.param), change.state, change.what
