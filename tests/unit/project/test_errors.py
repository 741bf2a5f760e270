"""Errors of the core are public, and tests assert them by class and data, not by prose."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

import pytest

import ucp
from tests.unit.project.source import ROOT, syntax_tree, tracked_files
from ucp import errors

PROSE = re.compile(r"\b[a-z]{2,}( [a-z]{2,}){2,}\b")
"""Three or more words of prose in a row."""


def kinds() -> list[type[errors.UcpError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UcpError)]


@pytest.mark.parametrize("kind", kinds())
def test_every_error_is_public(kind):
    assert kind.__name__ in errors.__all__


def test_no_other_module_of_the_core_has_errors_of_its_own():
    modules = [
        import_module(module.name) for module in walk_packages(ucp.__path__, "ucp.") if ".testing" not in module.name
    ]
    own = [f"{kind.__module__}.{kind.__name__}" for kind in errors.UcpError.__subclasses__()]
    assert modules
    assert [name for name in own if name.startswith("ucp.") and not name.startswith("ucp.errors.")] == []


def literals_with_prose(tree: ast.Module) -> Iterator[str]:
    """Arguments `match=` with three or more lower-case words in a row; names, numbers and shapes are data."""
    for keyword in ast.walk(tree):
        if isinstance(keyword, ast.keyword) and keyword.arg == "match":
            texts = [part.value for part in ast.walk(keyword.value) if isinstance(part, ast.Constant)]
            text = "|".join(map(str, texts))
            if PROSE.search(text):
                yield text


def test_expected_errors_are_matched_by_data_and_not_by_prose() -> None:
    files = [path for path in tracked_files() if path.parts[0] == "tests" and path.suffix == ".py"]
    files = [path for path in files if "match=" in (ROOT / path).read_text(encoding="utf-8")]
    found = [f"{path}: {text}" for path in files for text in literals_with_prose(syntax_tree(path))]
    assert found == [], "match a name, a number or a shape of the case instead"


@pytest.mark.parametrize(
    ("pattern", "is_prose"),
    [
        ('"expected one of the formats"', True),
        ('f"{name} has no {state} on rank {rank}"', False),
        ('rf"{name}: there is no state {state}"', True),
        (r'r"layers\.3\.weight.*expected 8.*found 6"', False),
    ],
)
def test_prose_is_noticed(pattern: str, is_prose: bool) -> None:
    tree = ast.parse(f"raises(Error, match={pattern})")
    assert bool(list(literals_with_prose(tree))) is is_prose
