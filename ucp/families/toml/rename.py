"""Rules of the user that rename tensors, from a TOML file (--rename).

    [[rename]]
    from = "model.layers.{layer}.attn.wq.weight"
    to = "layers.{layer}.attention.wq.weight"

    [[rename]]                 # joined: rows of the one, then those of the other
    from = ["layers.{layer}.gate.weight", "layers.{layer}.up.weight"]
    to = "layers.{layer}.gate_up.weight"

A list in `to` splits a tensor. `dim`, `groups`, `blocks` and `lengths` say how tensors join, `view` and `order` how a
single tensor is viewed, as in the aliases of a family. `ucp.families.translate` does both by reference: no data moves.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucp.errors import FamilyError, UnsupportedError, UsageError, format_list
from ucp.families.family import Family
from ucp.families.naming import Style
from ucp.families.recipes import TensorRecipe
from ucp.families.rule import Rule
from ucp.families.template import Template
from ucp.families.toml.document import Joining, RenameDocument, RenameTable, error_context, make_alias, read_document
from ucp.families.translate import translate

_FROM, _TO = "from", "to"


def read_renames(
    text: str, path: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, TensorRecipe], list[str]]:
    """Recipe of every tensor by its new name, and the names that no rule matches, which stay.

    `text`: of the rules file `path`.

    Raises UsageError for a file with mistakes, rules that fit no name, or two tensors under one name.
    """
    family = _family(text, path)
    read = {name: family.read(name, _FROM) for name in shapes}
    used = {parsed.rule.name for parsed in read.values() if parsed is not None}
    idle = [rule.meaning for rule in family.rules if rule.name not in used]
    if idle:
        raise UsageError(
            f"{path}: these rules fit no name of the checkpoint:\n{format_list(idle)}\nCorrect or remove them"
        )
    renamed_shapes = {name: shape for name, shape in shapes.items() if read[name] is not None}
    try:
        recipes = translate(family, renamed_shapes, _TO, source=_FROM)
    except (FamilyError, UnsupportedError) as error:
        raise UsageError(f"{path}: {error}") from error
    unchanged = [name for name, parsed in read.items() if parsed is None]
    twice = [name for name in unchanged if name in recipes]
    if twice:
        raise UsageError(f"{path}: rules give names that tensors without a rule have already:\n{format_list(twice)}")
    all_recipes = {**recipes, **{name: TensorRecipe.identity(name, shapes[name]) for name in unchanged}}
    order = {name: number for number, name in enumerate(shapes)}
    return dict(sorted(all_recipes.items(), key=lambda item: order[item[1].sources[0]])), unchanged


def _family(text: str, path: str) -> Family:
    """The rules as a family, whose canonical names no user sees."""
    document = read_document(text, path, RenameDocument)
    rules = []
    for number, table in enumerate(document.rename):
        with error_context(f"{path}: rename[{number}]"):
            rules.append(_rule(number, table))
    styles = {name: Style(name=name) for name in (_FROM, _TO)}
    values = {name: int(number) for name, number in document.sizes.items()}
    return Family(name=path, rules=tuple(rules), styles=styles, values=values)


def _rule(number: int, table: RenameTable) -> Rule:
    old, new = ((side,) if isinstance(side, str) else tuple(side) for side in (table.old, table.new))
    if min(len(old), len(new)) > 1:
        raise ValueError(f"expected one name on one of the two sides; got {[table.old, table.new]}")
    if len(set(new)) < len(new):
        raise ValueError(f"to: expected names that differ; got {table.new}")
    is_split = len(old) < len(new)
    aliases = {
        _FROM: make_alias(old, Joining() if is_split else table),
        _TO: make_alias(new, table if is_split else Joining()),
    }
    fields = {Template(name).fields for name in (*old, *new)}
    longest = max(fields, key=len)
    if any(set(names) - set(longest) for names in fields):
        raise ValueError(
            "expected the same fields on both sides; a side may lack a field whose numbers a tensor stacks; got "
            f"{[table.old, table.new]}"
        )
    name = Template(".".join((f"rule{number}", *(f"{{{field}}}" for field in longest))))
    aliases_by_style = {key: (alias,) for key, alias in aliases.items()}
    return Rule(name=name, axes=(), aliases=aliases_by_style, meaning=f"{table.old} -> {table.new}")
