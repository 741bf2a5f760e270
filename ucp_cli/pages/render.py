"""Facts, tables and lists, drawn alike on a terminal and in a file.

On a terminal lines are folded at its width; anywhere else a line is as long as it needs to be, without colours.
No name is ever cut short.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from io import StringIO

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ucp_cli.pages.units import printable

__all__ = ["Column", "facts", "heading", "lines", "stacked", "table", "write", "write_json"]

_ENDLESS = 1 << 16
"""Columns of what is not a terminal."""

Column = str
"""Heading of a column; one that starts with ">" is set flush right."""


def write(*parts: RenderableType | None) -> None:
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
    console.print(stacked(*parts))
    page = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n")
    if page:
        click.echo(page, color=terminal)


def write_json(document: object) -> None:
    """Print a JSON document to stdout."""
    click.echo(json.dumps(document, indent=1, allow_nan=False))


def stacked(*parts: RenderableType | None) -> RenderableType:
    """Parts below one another, leaving out those that are None."""
    return Group(*(part for part in parts if part is not None))


def heading(text: str) -> RenderableType:
    """The title of a section."""
    return Text(f"\n{text}", style="bold")


def facts(pairs: Iterable[tuple[str, str]]) -> RenderableType:
    """Names and values, one a line; pairs without a value are left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            grid.add_row(name, Text(printable(value)))
    return grid


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
    return stacked(heading(title) if title else None, Padding(drawn, (0, 0, 0, 2)))


def lines(title: str, items: Sequence[str], *, style: str = "") -> RenderableType | None:
    """A titled list; None without items."""
    if not items:
        return None
    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(overflow="fold")
    for item in items:
        grid.add_row("-", Text(printable(item), style=style))
    return Group(heading(title), Padding(grid, (0, 0, 0, 2)))
