"""Tables of stored names, which copies of a family that are bound to the same sizes share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ucp.families.naming import Stored

if TYPE_CHECKING:
    from ucp.families.template import Template

__all__ = ["Table", "Tables"]

Table = Mapping[tuple[str | None, str], tuple[Stored, ...]]
"""Style (None: any) and outline of a name, to the entries that it may be of."""

_MOST = 4
"""Tables kept: of the family as it was read, and of the last models that it was bound to."""


class Tables:
    """Tables by the sizes that they were made with: the rest of what names depend on is the same for all copies."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[frozenset[tuple[str, int]], Table] = {}

    def __reduce__(self) -> tuple[type[Tables], tuple[()]]:
        return Tables, ()

    def get(self, values: Mapping[str, int], entries: Iterable[Stored]) -> Table:
        """The table for these sizes; `entries` are looked at where it is not kept."""
        key = frozenset(values.items())
        table = self._made.pop(key, None)
        if table is None:
            table = _table(entries)
        while len(self._made) >= _MOST:
            self._made.pop(next(iter(self._made)))
        self._made[key] = table  # the last one now
        return table


def _table(entries: Iterable[Stored]) -> Table:
    found: dict[tuple[str | None, str], dict[tuple[Template, Template], Stored]] = {}
    for entry in entries:
        for own in (entry.style, None):  # None: any, the canonical one first
            alike = found.setdefault((own, entry.template.outline), {})
            alike.setdefault((entry.template, entry.rule.name), entry)
    return {key: tuple(alike.values()) for key, alike in found.items()}
