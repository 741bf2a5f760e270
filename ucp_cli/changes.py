"""Differences between two checkpoints as a table: equal ones of numbered layers are one row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from ucp.compare import Change
from ucp_cli.render import table
from ucp_cli.units import count_text, ranges_text

__all__ = ["change_table"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a name that is a number: the 12 of layers.12.mlp.weight."""


@dataclass(slots=True)
class _Row:
    """Changes that differ in the numbers of a name only."""

    first: Change
    changes: int = 0
    numel: int = 0
    largest: float = 0.0
    numbers: list[set[int]] = field(default_factory=list)

    def add(self, change: Change, numbers: Sequence[int]) -> None:
        self.changes += 1
        self.numel += change.numel
        if change.largest != change.largest or change.largest > self.largest:  # nan is the largest of all
            self.largest = change.largest
        self.numbers = self.numbers or [set() for _ in numbers]
        for seen, number in zip(self.numbers, numbers, strict=True):
            seen.add(number)


def change_table(changes: Sequence[Change], *, a: str, b: str) -> RenderableType | None:
    """Differences, grouped; None without any. `a`, `b`: what the two checkpoints are called."""
    rows = list(_rows(changes))
    if not rows:
        return None
    columns = ("parameter", ">", "state", "differs in", "a", "b", ">elements", ">largest difference")
    drawn = table("Differences", columns, [_cells(name, row) for name, row in rows])
    return Group(Text(f"a = {a}\nb = {b}"), *filter(None, [drawn]))


def _rows(changes: Sequence[Change]) -> Iterator[tuple[str, _Row]]:
    rows: dict[tuple[str, ...], _Row] = {}
    for change in changes:
        name = _NUMBER.sub("#", change.param)
        sides = ("", "") if change.what == "values" else (change.a, change.b)
        row = rows.setdefault((name, change.state, change.what, *sides), _Row(change))
        row.add(change, [int(number) for number in _NUMBER.findall(change.param)])
    for (name, *_), row in rows.items():
        yield name, row


def _cells(name: str, row: _Row) -> tuple[str | Text, ...]:
    label = Text(name if row.changes > 1 else row.first.param)
    if row.changes > 1:
        label.append("".join(f"  [{ranges_text(sorted(numbers))}]" for numbers in row.numbers), style="cyan")
    values = row.first.what == "values"
    return (
        label,
        f"×{row.changes}" if row.changes > 1 else "",
        row.first.state,
        row.first.what,
        "" if values else row.first.a,
        "" if values else row.first.b,
        count_text(row.numel) if values else "",
        f"{row.largest:.3g}" if values else "",
    )
