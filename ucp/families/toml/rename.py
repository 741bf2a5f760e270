"""Rules of the user's own that give tensors other names, out of a TOML file (--rename).

    [[rename]]
    from = "model.layers.{layer}.attn.wq.weight"
    to = "layers.{layer}.attention.wq.weight"

    [[rename]]                 # joined: rows of the one, then those of the other
    from = ["layers.{layer}.gate.weight", "layers.{layer}.up.weight"]
    to = "layers.{layer}.gate_up.weight"

A list on the other side splits. `dim`, `groups`, `blocks`, `lengths` say how tensors join, `view` and `order` how one
that is alone is looked at, as in the aliases of a family. Either is done by reference, by `ucp.families.translate`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucp.errors import FamilyError, UnsupportedError, UsageError, listed
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
    """New name to what it is made of, for all tensors, and the names that no rule is for, which stay.

    `text`: of the rules file `path`.

    Raises UsageError for a file with mistakes, rules that fit no name, or two tensors under one name.
    """
    family = _family(text, path)
    read = {name: family.read(name, _FROM) for name in shapes}
    used = {own.rule.name for own in read.values() if own is not None}
    idle = [rule.meaning for rule in family.rules if rule.name not in used]
    if idle:
        raise UsageError(f"{path}: these rules fit no name of the checkpoint:\n{listed(idle)}\nCorrect or remove them")
    given = {name: shape for name, shape in shapes.items() if read[name] is not None}
    try:
        made = translate(family, given, _TO, source=_FROM)
    except (FamilyError, UnsupportedError) as error:
        raise UsageError(f"{path}: {error}") from error
    kept = [name for name, own in read.items() if own is None]
    twice = [name for name in kept if name in made]
    if twice:
        raise UsageError(f"{path}: two tensors under one name, of which no rule is for the one:\n{listed(twice)}")
    every = {**made, **{name: TensorRecipe.identity(name, shapes[name]) for name in kept}}
    order = {name: number for number, name in enumerate(shapes)}
    return dict(sorted(every.items(), key=lambda own: order[own[1].sources[0]])), kept


def _family(text: str, path: str) -> Family:
    """The rules as those of a family of its own, whose canonical names nobody sees."""
    document = read_document(text, path, RenameDocument)
    rules = []
    for at, table in enumerate(document.rename):
        with error_context(f"{path}: rename[{at}]"):
            rules.append(_rule(at, table))
    styles = {name: Style(name=name) for name in (_FROM, _TO)}
    values = {name: int(number) for name, number in document.sizes.items()}
    return Family(name=path, rules=tuple(rules), styles=styles, values=values)


def _rule(at: int, table: RenameTable) -> Rule:
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
            "expected the same fields on both sides; one may lack some, where it holds several in one; got "
            f"{[table.old, table.new]}"
        )
    name = Template(".".join((f"rule{at}", *(f"{{{field}}}" for field in longest))))
    ways = {key: (alias,) for key, alias in aliases.items()}
    return Rule(name=name, axes=(), aliases=ways, meaning=f"{table.old} -> {table.new}")
