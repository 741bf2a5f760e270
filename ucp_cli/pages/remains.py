"""`ucp inspect` on a checkpoint that cannot be read: what its files are, from names and sizes, and what is wrong.

Names that differ in numbers only are one line, so that a gap in the ranks is seen:

>>> for row in _rows({"rank_0.pt": 5, "rank_1.pt": 5, "rank_3.pt": 2, "latest": 1}):
...     print(*row, sep=" | ")
rank_#.pt | [0-1,3] | 3 | 2 B to 5 B | 12 B
latest |  | 1 | 1 B | 1 B
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.text import Text

from ucp.api import Survey
from ucp.core.text.page import Section, facts, lines
from ucp.core.text.units import count_text, nbytes_text, printable, ranges_text
from ucp.io.folder import path_of
from ucp_cli.pages.render import table

__all__ = ["remains"]

_NUMBER = re.compile(r"\d+", re.ASCII)


def remains(survey: Survey, problem: str, *, each: bool) -> list[Section | RenderableType | None]:
    """The parts of the page. `problem`: why it cannot be read; `each`: a line for every file."""
    root = survey.path if path_of(survey.path).is_dir() else os.path.dirname(survey.path)
    sizes = {os.path.relpath(file.path, root): file.nbytes for file in survey.files}
    evidence = f" ({', '.join(survey.evidence)})" if survey.evidence else ""
    total = f"{count_text(len(sizes))} of {nbytes_text(sum(sizes.values()))}"
    each_file = [(name, nbytes_text(nbytes)) for name, nbytes in sizes.items()]
    return [
        facts(
            [
                ("checkpoint", survey.path),
                ("format", f"{survey.format}{evidence}"),
                ("readable", "NO: see Problems"),
                ("files", total),
            ]
        ),
        lines("Problems", [problem]),
        table("Files", ("file", ">bytes"), each_file)
        if each
        else table("Files, by name", ("name", "numbers", ">files", ">bytes each", ">bytes"), list(_rows(sizes))),
    ]


def _rows(sizes: Mapping[str, int]) -> Iterator[tuple[str | Text, ...]]:
    """A row for names that differ in numbers only; `sizes`: name to bytes."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in sizes:
        alike.setdefault(tuple(_NUMBER.split(name)), []).append(name)
    for names in alike.values():
        label, numbers = _joined(names)
        own = sorted(sizes[name] for name in names)
        spread = nbytes_text(own[0]) + (f" to {nbytes_text(own[-1])}" if own[-1] != own[0] else "")
        yield printable(label), numbers, count_text(len(names)), spread, nbytes_text(sum(own))


def _joined(names: list[str]) -> tuple[str, Text]:
    """One name for several, with "#" for numbers that are not the same in all; and those numbers."""
    columns = list(zip(*(_NUMBER.findall(name) for name in names), strict=True))
    varied = [len(set(column)) > 1 for column in columns]
    place = iter(zip(varied, columns, strict=True))

    def written(match: re.Match[str]) -> str:
        is_varied, _ = next(place)
        return "#" if is_varied else match.group()

    ranges = [sorted(set(map(int, own))) for is_varied, own in zip(varied, columns, strict=True) if is_varied]
    return _NUMBER.sub(written, names[0]), Text(" ".join(f"[{ranges_text(own)}]" for own in ranges), style="cyan")
