"""Names say a role or an act: a pronoun or a participle says neither.

`own`, `found` or `told` can stand for anything, so a reader has to look up every use. The lists name what this code
base once used; a name of a framework's field is not bound by us and so not counted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.project.source import source_modules, syntax_tree

PRONOUNS_AND_PARTICIPLES = """
apart asked begun believe believed beside crosswise dealt doubt doubts found fresh given held kept landing lane lanes
left lies made making mixed own ruled said spot spots stepped stretch stretches sweep taken there things told trail
untied vouch vouched wants ways whole wholes zeroed
"""
PARTICIPLES = """
arranged gathered joined judged labelled laid listed lost moved named narrowed numbered ordered owed owned patched
placed prepared seen settled shown spelled stored turned undecided wanted written
"""
EMPTY_NAMES = frozenset(PRONOUNS_AND_PARTICIPLES.split())
EMPTY_FUNCTION_NAMES = EMPTY_NAMES | frozenset(PARTICIPLES.split())
ALLOWED = 150
"""Of some twenty thousand names. A few participles are the field's own words."""


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line, name and whether a function has it, for every variable, parameter, field and function of a file."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name, False
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name, True


def empty_names(tree: ast.Module) -> list[str]:
    """`line: name` of the bound names that say nothing."""
    return [
        f"{line}: {name}"
        for line, name, is_function in bound_names(tree)
        if name.strip("_").lower() in (EMPTY_FUNCTION_NAMES if is_function else EMPTY_NAMES)
    ]


def test_names_say_what_they_name() -> None:
    empty = [f"{path}:{name}" for path in source_modules().values() for name in empty_names(syntax_tree(path))]
    assert len(empty) <= ALLOWED, "\n".join(empty)


def test_an_empty_name_is_noticed() -> None:
    tree = ast.parse("def told(own):\n    found = own\n    self.held = found\n    return [spot for spot in found]\n")
    assert empty_names(tree) == ["1: told", "1: own", "2: found", "3: held", "4: spot"]
