"""The files of the project as syntax trees."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = {
    "ucp": "ucp",
    "ucp_cli": "ucp_cli",
    "formats/ucp_formats": "ucp_formats",
    "patterns/ucp_patterns": "ucp_patterns",
}
"""Folder of each package that is shipped: its name."""


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file that git knows, relative to the root; all files where this is no clone (an unpacked archive)."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        return tuple(
            path.relative_to(ROOT) for path in sorted(ROOT.rglob("*")) if path.is_file() and "." not in path.parts[0]
        )
    return tuple(path for name in listing.stdout.splitlines() if (ROOT / (path := Path(name))).exists())


@cache
def source_modules() -> dict[str, Path]:
    """Dotted name of each module that is shipped: its file, relative to the root."""
    modules = {}
    for path in tracked_files():
        for folder, package in PACKAGES.items():
            if path.suffix == ".py" and path.is_relative_to(folder):
                inside = path.relative_to(folder).with_suffix("")
                parts = [package, *(part for part in inside.parts if part != "__init__")]
                modules[".".join(parts)] = path
    return modules


@cache
def syntax_tree(path: Path) -> ast.Module:
    """The syntax tree of a file given relative to the root."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))
