"""Pages: the contents of a report as rows and lists, which are printed as text, as HTML (in notebooks), or by the CLI.

>>> page = [facts([("wrote", "atoms/"), ("resumed", "")]), lines("Notes", ["no optimizer"])]
>>> print(render_text(page))
wrote  atoms/
<BLANKLINE>
Notes
  - no optimizer
>>> render_html(page[1:])
'<h4>Notes</h4><ul><li>no optimizer</li></ul>'
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

from ucp.core.text.units import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows under a title: labels and values, the items of a list, or a table. Without rows it is not printed."""

    title: str = ""
    """Heading; empty for none."""
    columns: tuple[str, ...] = ()
    """Headings of a table; one that starts with ">" is right-aligned."""
    rows: tuple[tuple[str, ...], ...]
    """Cells of each row; a row with a single cell is the item of a list."""
    more: str = ""
    """Line below the table that counts the rows left out of it."""

    @property
    def is_list(self) -> bool:
        """Whether rows are the items of a list."""
        return not self.columns and all(len(row) == 1 for row in self.rows)


Part = Section | str
"""A section, or a line of text."""

Page = Iterable[Part]
"""Parts below one another."""


def facts(pairs: Iterable[tuple[str, str]], title: str = "") -> Section:
    """Labels and values; pairs without a value are left out."""
    return Section(title=title, rows=tuple(pair for pair in pairs if pair[1]))


def lines(title: str, items: Iterable[str]) -> Section:
    """A list."""
    return Section(title=title, rows=tuple((item,) for item in items))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, most: int, all_in: str) -> Section:
    """A table of the first `most` rows. `all_in`: clause that tells the reader where all rows are."""
    more = f"and {len(rows) - most:,} more row{'s' * (len(rows) - most > 1)}: {all_in}" if len(rows) > most else ""
    return Section(title=title, columns=tuple(columns), rows=tuple(map(tuple, rows[:most])), more=more)


class Report(ABC):
    """A value that is printed as a page."""

    __slots__ = ()

    @abstractmethod
    def page(self) -> Page:
        """What it says, as data."""

    def __str__(self) -> str:
        return render_text(self.page())

    def _repr_html_(self) -> str:
        """For notebooks."""
        return render_html(self.page())


def render_text(page: Page) -> str:
    """A page as plain text, as the command line prints it to a file."""
    printed = (line for part in page for line in ([part] if isinstance(part, str) else _section_lines(part)))
    return "\n".join(printable(line).rstrip() for line in printed).strip("\n")


def _section_lines(section: Section) -> Iterator[str]:
    """Lines of a section, the columns aligned; a cell may have several."""
    if not section.rows:
        return
    if section.title:
        yield from ("", section.title)
    head = [tuple(column.removeprefix(">") for column in section.columns)] if section.columns else []
    rows = [("-", *row) for row in section.rows] if section.is_list else [*head, *section.rows]
    cells = [[printable(cell).split("\n") for cell in row] for row in rows]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    aligned = [">" if column.startswith(">") else "<" for column in section.columns] or "<<"
    indent, gap = "  " if head or section.is_list else "", " " if section.is_list else "  "
    for row in cells:
        for line in zip_longest(*row, fillvalue=""):
            columns = zip(line, aligned, widths, strict=True)
            yield indent + gap.join(f"{text:{side}{width}}" for text, side, width in columns)
    if section.more:
        yield f"{indent}{section.more}"


def render_html(page: Page) -> str:
    """A page as HTML, every text of it escaped."""
    return "".join(_tag("p", part) if isinstance(part, str) else _section_html(part) for part in page if part)


def _section_html(section: Section) -> str:
    if not section.rows:
        return ""
    title, more = (_tag(tag, text) if text else "" for tag, text in (("h4", section.title), ("p", section.more)))
    if section.is_list:
        return f"{title}<ul>{''.join(_tag('li', item) for (item,) in section.rows)}</ul>"
    sides = [_side("right" if column.startswith(">") else "left") for column in section.columns] or [_side("left")] * 2
    heads = zip(section.columns, sides, strict=False)  # facts have none
    head = [_tag("th", column.removeprefix(">"), f' scope="col"{side}') for column, side in heads]
    rows = [[_tag("td", cell, side) for cell, side in zip(row, sides, strict=True)] for row in section.rows]
    if not section.columns:  # facts
        labels = [_tag("th", row[0], f' scope="row"{sides[0]}') for row in section.rows]
        rows = [[label, *row[1:]] for label, row in zip(labels, rows, strict=True)]
    return f"{title}<table>{''.join(f'<tr>{row}</tr>' for row in map(''.join, (head, *rows)) if row)}</table>{more}"


def _side(side: str) -> str:
    """The attribute of a cell: notebooks align cells to the right."""
    return f' style="text-align:{side}"'


def _tag(name: str, text: str, attributes: str = "") -> str:
    return f"<{name}{attributes}>{escape(printable(text)).replace(chr(10), '<br>')}</{name}>"
