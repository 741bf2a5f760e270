"""How styles store parameters, out of a parsed rules file."""

from __future__ import annotations

from ucp.families.rule import Alias, OptionValue
from ucp.families.toml.fields import (
    Place,
    dim_of,
    expression_of,
    items_of,
    one_option_of,
    only,
    table_of,
    template_of,
    text_of,
    texts_of,
)

__all__ = ["alias_of", "alias_table", "aliases_by_rule", "lengths_of"]

_ALIAS_KEYS = frozenset(
    {
        *("name", "names", "dim", "groups", "blocks", "lengths", "view", "views", "order", "orders"),
        *("when", "beside"),
    }
)


def alias_table(value: object, place: Place) -> dict[str, tuple[Alias, ...]]:
    """Style to a name, or a list of ways to store it: names, and tables for what is more than one tensor.

    An empty list: the style has no such buffer.
    """
    found = {}
    for style, own in table_of(value, place).items():
        ways = own if isinstance(own, list) else [own]
        found[style] = tuple(alias_of(way, place.at(style).at(at)) for at, way in enumerate(ways))
    return found


def alias_of(value: object, place: Place) -> Alias:
    """A way to store a parameter: a name, or a table. Raises UsageError."""
    if isinstance(value, str):
        return Alias(names=(_alias_name(value, place),))
    table = table_of(value, place)
    only(table, _ALIAS_KEYS, place)
    names = texts_of(table["names"], place.at("names")) if "names" in table else (text_of(table.get("name"), place),)
    blocks, view, lengths = (lengths_of(table.get(key, []), place.at(key)) for key in ("blocks", "view", "lengths"))
    views = [lengths_of(own, place.at("views")) for own in items_of(table.get("views", []), place.at("views"))]
    orders = [_order(own, place.at("orders")) for own in items_of(table.get("orders", []), place.at("orders"))]
    for key, each in (("lengths", lengths), ("views", views), ("orders", orders)):
        if each and len(each) != len(names):
            raise place.at(key).wrong(f"one entry for each of {', '.join(names)}", table[key])
    return Alias(
        names=tuple(_alias_name(name, place) for name in names),
        dim=dim_of(table.get("dim", 0), place.at("dim")),
        groups=expression_of(table["groups"], place.at("groups")) if "groups" in table else None,
        blocks=blocks,
        view=view,
        order=_order(table.get("order", []), place.at("order")),
        views=tuple(views),
        orders=tuple(orders),
        lengths=lengths,
        when=expression_of(table["when"], place.at("when")) if "when" in table else None,
        beside=tuple(
            template_of(own, place.at("beside")).text for own in items_of(table.get("beside", []), place.at("beside"))
        ),
    )


def lengths_of(value: object, place: Place) -> tuple[OptionValue, ...]:
    """Lengths of dims: numbers, expressions, -1 for one that is left open. Raises UsageError."""
    options = tuple(one_option_of(own, place) for own in items_of(value, place))
    if any(isinstance(own, int) and own < -1 for own in options):
        raise place.wrong("lengths, or -1 for what is left", value)
    return options


def _order(value: object, place: Place) -> tuple[int, ...]:
    order = tuple(dim_of(own, place) for own in items_of(value, place))
    if sorted(order) != list(range(len(order))):
        raise place.wrong("every dim once", value)
    return order


def _alias_name(text: str, place: Place) -> str:
    if "{=" not in text and "+=" not in text:
        template_of(text, place)
    return text


def aliases_by_rule(value: object, place: Place) -> dict[str, dict[str, tuple[Alias, ...]]]:
    """`[alias.STYLE]` with template = names: aliases of rules that are extended."""
    found: dict[str, dict[str, tuple[Alias, ...]]] = {}
    for style, names in table_of(value, place).items():
        for template, own in table_of(names, place.at(style)).items():
            alias = alias_table({style: own}, place.at(style).at(template))
            found.setdefault(template, {}).update(alias)
    return found
