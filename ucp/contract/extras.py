"""Extras by a table of each format: their names, their keys in its files, and which ranks have values of their own.

A reader takes what the table names out of a file; a target finds by it what of any source has a place in its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ucp.contract.companions import is_companion
from ucp.core.index import Index

__all__ = ["ExtraRow", "ExtraTable", "ExtraValues"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraRow:
    """What a format has of one extra."""

    keys: tuple[str, ...] = ()
    """Keys in its files that the value is read from; none where it is made otherwise."""
    is_carried: bool = True
    """Whether its target writes the value of the source as it is; else it writes a value of its own, or needs none."""
    rank_stage: int = 0
    """ZeRO stage from which each rank has a file for a value of its own."""


ExtraTable = Mapping[str, ExtraRow]
"""Name of an extra, or how names start (with a slash at the end), to its row."""


class ExtraValues:
    """Extras of `index`, by name and rank, for a target with `table`.

    `same_ranks`: whether the target has as many ranks; only then does each get the values that it had for itself.
    """

    def __init__(self, index: Index, table: ExtraTable, *, same_ranks: bool = True) -> None:
        extras = [extra for extra in index.extras if not is_companion(extra)]
        self._common = {extra.name: extra.value for extra in extras if extra.rank is None}
        self._of_ranks = {(extra.name, extra.rank): extra.value for extra in extras if extra.rank is not None}
        self._table = table
        self._same_ranks = same_ranks

    def names(self) -> list[str]:
        """Every name, once."""
        return list(dict.fromkeys([*self._common, *(name for name, _ in self._of_ranks)]))

    def get(self, name: str, rank: int = 0) -> object:
        """Value of `name` for `rank`: its own where it may have one, over the common one; None if there is none."""
        common = self._common.get(name)
        value = self._of_ranks.get((name, rank if self._same_ranks else 0))
        if value is None or (common is not None and not self._same_ranks):
            return common
        return {**common, **value} if isinstance(common, dict) and isinstance(value, dict) else value

    def mapping(self, name: str, rank: int = 0) -> Mapping[str, object]:
        """Value of `name` as a mapping; empty if it is none."""
        value = self.get(name, rank)
        return value if isinstance(value, dict) else {}

    def below(self, prefix: str, rank: int = 0) -> Iterator[tuple[str, object]]:
        """Extras whose name starts with `prefix`, by the rest of the name; those that `rank` has a value of."""
        for name in self.names():
            if name.startswith(prefix) and (value := self.get(name, rank)) is not None:
                yield name.removeprefix(prefix), value

    def without_place(self) -> list[str]:
        """Names that the table does not have, sorted."""
        return sorted(name for name in self.names() if self._row(name) is None)

    def without_rank(self, stage: int) -> list[str]:
        """Names of which ranks above 0 have values that files of a ZeRO `stage` have no room for, sorted."""
        lost = {name for name, rank in self._of_ranks if rank > 0}
        last = max((row.rank_stage for row in self._table.values()), default=0)
        stages = {name: row.rank_stage if (row := self._row(name)) else last for name in lost}
        return sorted(name for name in lost if not (self._same_ranks and stage >= stages[name]))

    def _row(self, name: str) -> ExtraRow | None:
        starts = (row for start, row in self._table.items() if start.endswith("/") and name.startswith(start))
        return self._table.get(name) or next(starts, None)
