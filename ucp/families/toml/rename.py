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

from ucp.core.patches import Made
from ucp.errors import FamilyError, UnsupportedError, UsageError, listed
from ucp.families.family import Family, Style
from ucp.families.rule import Rule
from ucp.families.template import Template
from ucp.families.toml.alias import alias_of
from ucp.families.toml.fields import Place, document_of, numbers_of, only, table_of, tables_of, template_of
from ucp.families.translate import translated

__all__ = ["renames_of"]

_FROM, _TO = "from", "to"
_JOINING = ("dim", "groups", "blocks", "lengths")
_KEYS = frozenset({_FROM, _TO, *_JOINING, "view", "order", "views", "orders"})


def renames_of(text: str, path: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Made], list[str]]:
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
        made = translated(family, given, _TO, source=_FROM)
    except (FamilyError, UnsupportedError) as error:
        raise UsageError(f"{path}: {error}") from error
    kept = [name for name, own in read.items() if own is None]
    twice = [name for name in kept if name in made]
    if twice:
        raise UsageError(f"{path}: two tensors under one name, of which no rule is for the one:\n{listed(twice)}")
    every = {**made, **{name: Made.whole(name, shapes[name]) for name in kept}}
    order = {name: number for number, name in enumerate(shapes)}
    return dict(sorted(every.items(), key=lambda own: order[own[1].sources[0]])), kept


def _family(text: str, path: str) -> Family:
    """The rules as those of a family of its own, whose canonical names nobody sees."""
    place = Place(path)
    document = document_of(text, path)
    only(document, frozenset({"rename", "sizes"}), place)
    rules = tuple(_rule(at, own, place.at("rename").at(at)) for at, own in tables_of(document, "rename", place))
    if not rules:
        raise place.wrong("rules, as [[rename]] tables with from and to", document)
    styles = {name: Style(name=name) for name in (_FROM, _TO)}
    values = numbers_of(document.get("sizes", {}), place.at("sizes"))
    return Family(name=path, rules=rules, styles=styles, values=values)


def _rule(at: int, value: object, place: Place) -> Rule:
    table = table_of(value, place)
    only(table, _KEYS, place)
    sides = {key: own if isinstance(own := table.get(key), list) else [own] for key in (_FROM, _TO)}
    if min(map(len, sides.values())) > 1:
        raise place.wrong("one name on one of the two sides", [table.get(_FROM), table.get(_TO)])
    several = _FROM if len(sides[_FROM]) >= len(sides[_TO]) else _TO
    how = {key: own for key, own in table.items() if key not in (_FROM, _TO)}
    aliases = {
        key: alias_of({"names": own, **(how if key == several else {})}, place.at(key)) for key, own in sides.items()
    }
    names = [template_of(name, place) for own in aliases.values() for name in own.names]
    if len({name.text for name in names[-len(aliases[_TO].names) :]}) < len(aliases[_TO].names):
        raise place.at(_TO).wrong("names that differ", table[_TO])
    fields = {name.fields for name in names}
    longest = max(fields, key=len)
    if any(set(own) - set(longest) for own in fields):
        raise place.wrong("the same fields on both sides; one may lack some, where it holds several in one", table)
    name = Template(".".join((f"rule{at}", *(f"{{{field}}}" for field in longest))))
    ways = {key: (own,) for key, own in aliases.items()}
    return Rule(name=name, axes=(), aliases=ways, meaning=f"{table[_FROM]} -> {table[_TO]}")
