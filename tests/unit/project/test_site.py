"""The site shows every page and every public name."""

import re
from pathlib import Path

import ucp

ROOT = Path(__file__).parents[3]
LEFT_OUT = {"changes", "examples"}
"""Folders of docs/ that are no part of the site."""


def test_every_page_is_in_the_navigation() -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    listed = set(re.findall(r"^\s+- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(page) for page in pages if page.parts[0] not in LEFT_OUT} == listed


def test_the_page_of_python_names_has_all_of_them() -> None:
    shown = set(re.findall(r"^::: ucp\.(\w+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE))
    assert shown - {"errors"} == set(ucp.__all__) - {"UcpError"}  # `ucp.errors` has it
