"""Facts, tables and lists, drawn alike on a terminal and in a file.

On a terminal lines are folded at its width; anywhere else a line is as long as it needs to be, without colours.
No name is ever cut short.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from io import StringIO

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ucp.core.text.page import Section
from ucp.core.text.units import printable

_ENDLESS = 1 << 16
"""Columns if stdout is not a terminal."""

_STYLES = {
    **dict.fromkeys(("Warnings", "Missing", "In doubt", "Problems"), "bold red"),
    **dict.fromkeys(("Damage", "Optimizer", "Copies that differ"), "red"),
    **dict.fromkeys(("Without a rule", "With several rules", "Not as their rule says"), "red"),
    **dict.fromkeys(("Casts", "Left behind"), "yellow"),
}
"""Title of a list to the style of its items."""

Column = str
"""Heading of a column; one that starts with ">" is right-aligned."""


def write(*parts: Section | RenderableType | None) -> None:
    """Print parts to stdout as one page, leaving out those that are None; nothing when all are."""
    terminal = sys.stdout.isatty()
    buffer = StringIO()
    console = Console(
        file=buffer,
        width=None if terminal else _ENDLESS,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    console.print(stack(*parts))
    page = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n")
    if page:
        click.echo(page, color=terminal)


def write_json(document: object) -> None:
    """Print a JSON document to stdout."""
    click.echo(json.dumps(document, indent=1, allow_nan=False))


def stack(*parts: Section | RenderableType | None) -> RenderableType:
    """Parts below one another, leaving out those that are None."""
    drawn = (_draw(part) if isinstance(part, Section) else part for part in parts)
    return Group(*(Text(printable(part)) if isinstance(part, str) else part for part in drawn if part is not None))


def _draw(section: Section) -> RenderableType | None:
    if not section.rows:
        return None
    if section.columns:
        more = Text(f"  {section.more}") if section.more else None
        return stack(table(section.title, section.columns, section.rows), more)
    if section.is_list:
        items = [("-", item) for (item,) in section.rows]
        body: RenderableType = Padding(_grid(items, gap=1, text=_STYLES.get(section.title, "")), (0, 0, 0, 2))
    else:
        body = _grid(section.rows, gap=2, label="cyan")
    return stack(heading(section.title) if section.title else None, body)


def _grid(rows: Sequence[Sequence[str]], *, gap: int, label: str = "", text: str = "") -> RenderableType:
    """Two columns. `label`, `text`: their styles."""
    grid = Table.grid(padding=(0, gap))
    grid.add_column(style=label, no_wrap=True)
    grid.add_column(overflow="fold")
    for first, second in rows:
        grid.add_row(first, Text(printable(second), style=text))
    return grid


def heading(text: str) -> RenderableType:
    """The title of a section."""
    return Text(f"\n{text}", style="bold")


def table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> RenderableType | None:
    """A table under its title, if it has one; None without rows."""
    if not rows:
        return None
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        right = column.startswith(">")
        drawn.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return stack(heading(title) if title else None, Padding(drawn, (0, 0, 0, 2)))
