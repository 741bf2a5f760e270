"""What docstrings and pages mention exists: a module that was renamed leaves no sentence behind that points at it."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.unit.project.source import PACKAGES, ROOT, source_modules, syntax_tree, tracked_files

MENTION = re.compile(r"`([\w./-]+)`")
ROOM = re.compile(r"(?:ucp|ucp_cli|ucp_formats|ucp_patterns|formats|patterns|tests|docs|fixtures)/[\w./-]+")
DOTTED = re.compile(r"(?!ucp\.json)(?:ucp|ucp_cli|ucp_formats|ucp_patterns)(?:\.\w+)+")
NOT_PYTHON = frozenset(
    {"ucp.formats", "ucp.targets", "ucp.patterns", "ucp.families", "ucp.engines", "ucp.live", "ucp.unread"}
)
"""Names of groups of entry points."""


def mentions(text: str) -> Iterator[str]:
    """Paths and dotted names of the project that a text has in backticks."""
    for mention in MENTION.findall(text):
        if ROOM.fullmatch(mention) or DOTTED.fullmatch(mention):
            yield mention


def exists(mention: str) -> bool:
    """Whether a path is there, or a dotted name can be imported."""
    if "/" in mention:
        return any(is_tracked(f"{folder}{mention}") for folder in ("", "formats/", "patterns/"))
    return mention in NOT_PYTHON or can_be_imported(mention)


@cache
def tracked_paths() -> frozenset[str]:
    """Every file that git knows, also without its `.py`, and every folder."""
    files = tracked_files()
    folders = (str(folder) for file in files for folder in file.parents)
    return frozenset(
        [*map(str, files), *(str(file.with_suffix("")) for file in files if file.suffix == ".py"), *folders]
    )


def is_tracked(path: str) -> bool:
    """Whether git knows a file or a folder, which may be named without its `.py`."""
    return path.rstrip("/") in tracked_paths()


def can_be_imported(name: str) -> bool:
    """Whether a dotted name leads to a module, or to what a module has."""
    module, attributes = name, []
    while module not in source_modules():
        module, _, attribute = module.rpartition(".")
        attributes.insert(0, attribute)
    value = importlib.import_module(module)
    for attribute in attributes:
        if not hasattr(value, attribute) and attribute not in getattr(value, "__annotations__", {}):
            return False
        value = getattr(value, attribute, None)
    return True


def docstrings(path: Path) -> Iterator[str]:
    """Every docstring of a file."""
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_what_docstrings_mention_exists() -> None:
    gone = [
        f"{path}: {mention}"
        for path in source_modules().values()
        if any(mentions((ROOT / path).read_text(encoding="utf-8")))
        for text in docstrings(path)
        for mention in mentions(text)
        if not exists(mention)
    ]
    assert gone == []


def test_what_pages_mention_exists() -> None:
    pages = [path for path in tracked_files() if path.suffix == ".md" and path.parent != Path("docs/changes")]
    gone = [
        f"{page}: {mention}"
        for page in pages
        if page.name not in {"CHANGELOG.md", "PROVENANCE.md"}
        for mention in mentions((ROOT / page).read_text(encoding="utf-8"))
        if not exists(mention)
    ]
    assert gone == []


def test_what_is_gone_is_noticed() -> None:
    text = "`ucp/core/index.py`, `ucp/gone.py`, `ucp.core.index.AtomIndex`, `ucp.core.index.Gone`, `torch.nn`"
    assert [mention for mention in mentions(text) if not exists(mention)] == ["ucp/gone.py", "ucp.core.index.Gone"]


def test_every_package_has_a_room_in_the_design_page() -> None:
    design = (ROOT / "docs/explanation/design.md").read_text(encoding="utf-8")
    rooms = {path.parts[1] for path in source_modules().values() if path.parts[0] == "ucp" and len(path.parts) > 2}
    missing = [room for room in sorted(rooms) if f"| `ucp/{room}/`" not in design]
    assert missing == []
    assert all(f"`{package}/" in design for package in PACKAGES.values())


def test_a_cell_of_the_page_of_limits_has_at_most_40_words() -> None:
    page = (ROOT / "docs/explanation/limits.md").read_text(encoding="utf-8")
    cells = [cell for line in page.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    assert [cell for cell in cells if len(cell.split()) > 40] == []
