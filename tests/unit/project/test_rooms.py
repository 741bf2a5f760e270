"""Rooms that a newcomer finds: a dozen entries a folder, modules of a size that one reads, short chains of imports."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.unit.project.source import ROOT, source_modules, tracked_files

ENTRIES = 12
LINES = 400
CHAIN = 18
EXEMPT = (Path("patterns/ucp_patterns/families"), Path("fixtures"))
"""Folders of data: an entry per model family or checkpoint."""
ROOMS = Path("ucp")
"""The folder of the rooms themselves, which `docs/explanation/design.md` lists."""


def test_a_folder_has_at_most_a_dozen_entries() -> None:
    entries = defaultdict(set)
    for path in tracked_files():
        if path.suffix == ".py":
            for parent in path.parents[:-1]:
                entries[parent].add(path.relative_to(parent).parts[0])
    crowded = {
        str(folder): len(names)
        for folder, names in entries.items()
        if len(names) > ENTRIES and folder != ROOMS and not any(map(folder.is_relative_to, EXEMPT))
    }
    assert crowded == {}


def test_a_module_is_at_most_400_lines() -> None:
    lengths = {
        str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in source_modules().values()
    }
    assert {path: length for path, length in lengths.items() if length > LINES} == {}


def test_a_chain_of_imports_is_at_most_18_modules_long() -> None:
    chain = longest_chain({name: imports_at_start(name) for name in source_modules()})
    assert len(chain) <= CHAIN, " -> ".join(chain)


def test_a_long_chain_is_noticed() -> None:
    assert longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == ["a", "b", "c"]


def imports_at_start(module: str) -> set[str]:
    """The project's modules that `module` imports when it is imported itself, not later or for the type checker.

    A package is imported before its modules, so a module that imports its own package starts nothing.
    """
    modules = source_modules()
    imported = set()
    for statement in head_of(modules[module]).body:
        if isinstance(statement, ast.ImportFrom):
            submodules = {f"{statement.module}.{alias.name}" for alias in statement.names}
            imported |= submodules & modules.keys() or {statement.module} & modules.keys()
        elif isinstance(statement, ast.Import):
            imported |= {alias.name for alias in statement.names} & modules.keys()
    return {name for name in imported if not f"{module}.".startswith(f"{name}.")}


def head_of(path: Path) -> ast.Module:
    """What stands before the first class or function: every import of the start, as `make lint` sees to (E402)."""
    text = (ROOT / path).read_text(encoding="utf-8")
    try:
        return ast.parse(re.split(r"^(?:class|def|async def|@)", text, maxsplit=1, flags=re.MULTILINE)[0])
    except SyntaxError:  # a text that has a line like one of these
        return ast.parse(text)


def longest_chain(imports: dict[str, set[str]]) -> list[str]:
    """The longest way from module to imported module. Imports are not circular: Python would have refused them."""

    @cache
    def chain(module: str) -> tuple[str, ...]:
        return module, *longest(chain(imported) for imported in imports[module])

    return list(longest(chain(module) for module in sorted(imports)))


def longest(chains: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The first of the longest chains; empty if there is none."""
    return max(chains, key=len, default=())
