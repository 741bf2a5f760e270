"""Differences between two checkpoints as tables: those of numbered layers are one row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.text import Text

from ucp.errors import counted
from ucp.transfer.differences import Change
from ucp_cli.pages.render import facts, stacked, table
from ucp_cli.pages.units import count_text, printable, ranges_text

__all__ = ["change_tables"]

_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""A part of a name that is a number: the 12 of layers.12.mlp.weight."""


@dataclass(slots=True)
class _Row:
    """Changes shown on one line."""

    first: Change
    """The first of them."""
    changes: int = 0
    """How many."""
    numel: int = 0
    """Elements that differ, in all."""
    largest: float = 0.0
    """Largest difference of all; not a number is larger than any."""
    numbers: list[set[int]] = field(default_factory=list)
    """Numbers that stand in the name, by place."""

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
    def label(self) -> Text:
        """Name, with "#" for numbers that differ."""
        if self.changes == 1:
            return Text(printable(self.first.param))
        label = Text(printable(_NUMBER.sub("#", self.first.param)))
        label.append("".join(f"  [{ranges_text(sorted(numbers))}]" for numbers in self.numbers), style="cyan")
        return label

    @property
    def times(self) -> str:
        """How many parameters the line stands for."""
        return f"×{self.changes}" if self.changes > 1 else ""


_MOST_ROWS = 20
"""Rows of a table; the one that matters is not to be lost among hundreds."""


def _short(title: str, columns: Sequence[str], rows: Sequence[tuple[str | Text, ...]]) -> RenderableType | None:
    """A table of the first rows, and how many there are beside them."""
    drawn = table(title, columns, rows[:_MOST_ROWS])
    if len(rows) <= _MOST_ROWS:
        return drawn
    return stacked(
        drawn, Text(f"  and {counted(len(rows) - _MOST_ROWS, 'more row', 'more rows')} (--json lists all differences)")
    )


def change_tables(changes: Sequence[Change], *, a: str, b: str) -> RenderableType | None:
    """Differences, grouped; None without any. `a`, `b`: what the two checkpoints are called."""
    if not changes:
        return None
    values = [change for change in changes if change.what == "values"]
    hyper = [change for change in changes if change.what == "group"]
    extras = [(c.param.removeprefix("extra/"), c.state, c.a, c.b) for c in changes if c.what == "extra"]
    others = [change for change in changes if change.what not in {"values", "group", "extra"}]
    return stacked(
        Text(""),
        facts([("a", a), ("b", b)]),
        _short("Structure", ("parameter", ">", "state", "differs in", "a", "b"), _structure(others)),
        _short("Hyper-parameters", ("name", "a", "b", "of"), _hyper(hyper)),
        _short("Extras", ("extra", "entry", "a", "b"), extras),
        _short("Values, by state", ("state", ">tensors", ">elements", ">largest"), _by_state(values)),
        _short("Values, by parameter", ("parameter", ">", "state", ">elements", ">largest"), _by_parameter(values)),
    )


def _grouped(changes: Iterable[Change], key: Callable[[Change], object]) -> list[_Row]:
    rows: dict[object, _Row] = {}
    for change in changes:
        rows.setdefault(key(change), _Row(change)).add(change)
    return list(rows.values())


def _alike(change: Change) -> tuple[str, str, str]:
    """What changes of one layer after another have in common."""
    return _NUMBER.sub("#", change.param), change.state, change.what


def _structure(changes: Sequence[Change]) -> list[tuple[str | Text, ...]]:
    rows = _grouped(changes, lambda change: (*_alike(change), change.a, change.b))
    return [(r.label, r.times, r.first.state, r.first.what, r.first.a, r.first.b) for r in rows]


def _hyper(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    rows = _grouped(changes, lambda change: (change.state, change.a, change.b))
    return [(row.first.state, row.first.a, row.first.b, counted(row.changes, "parameter")) for row in rows]


def _by_state(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    rows = _grouped(changes, lambda change: change.state)
    return [(r.first.state, count_text(r.changes), count_text(r.numel), f"{r.largest:.3g}") for r in rows]


def _by_parameter(changes: Sequence[Change]) -> list[tuple[str | Text, ...]]:
    rows = _grouped(changes, _alike)
    return [(r.label, r.times, r.first.state, count_text(r.numel), f"{r.largest:.3g}") for r in rows]
