"""Reads the TOML text of a model family into values; every mistake is named with its place.

A family starts from those it `extends`, in order; what it says itself comes on top: a rule with a template that is
there already replaces all rules of that template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import NamedTuple

from ucp.errors import UsageError
from ucp.families.expression import Expression
from ucp.families.family import CANONICAL, Evidence, Family, Style, Tied
from ucp.families.rule import DIM, Alias, AxisRule, PatternFactory, Rule
from ucp.families.template import Template
from ucp.families.toml.alias import alias_table, aliases_by_rule, lengths_of
from ucp.families.toml.config import config_parts, more_parts
from ucp.families.toml.fields import (
    Place,
    dim_of,
    document_of,
    expression_of,
    flag_of,
    numbers_of,
    only,
    option_of,
    table_of,
    tables_of,
    template_of,
    text_of,
    texts_of,
)

__all__ = ["Header", "header", "read_family"]

_KEYS = frozenset(
    {
        *("name", "title", "extends", "kind_of", "abstract", "order", "ignored"),
        *(
            "evidence",
            "sizes",
            "given",
            "tensors",
            "style",
            "tied",
            "rule",
            "drop",
            "alias",
            "repeat",
            "limits",
            "config",
        ),
    }
)

_RULE_KEYS = frozenset({"name", "when", "meaning", "buffer", "shape", "padded", "alias"})

_MOST_RULES = 10_000
"""Rules of a family, and places in its order."""

_MOST_STYLES = 16
"""Styles of which each is like the next."""

_AXES = ("pp", "ep", "etp", "tp", "cp", "dp")


class Header(NamedTuple):
    """What a rules file says of its family before its rules are read."""

    name: str
    """Name of the family."""
    extends: tuple[str, ...]
    """Names of those it extends."""
    kind_of: tuple[str, ...]
    """More general families."""
    abstract: bool
    """Whether it is only there for others to extend."""
    arguments: Mapping[str, object]
    """Recorded arguments by which it is recognised."""


def header(text: str, source: str) -> Header:
    """The header of a rules file. Raises UsageError."""
    document, place = document_of(text, source), Place(source)
    return Header(
        name=text_of(document.get("name"), place.at("name")),
        extends=texts_of(document.get("extends", []), place.at("extends")),
        kind_of=texts_of(document.get("kind_of", []), place.at("kind_of")),
        abstract=flag_of(document.get("abstract", False), place.at("abstract")),
        arguments=_evidence(
            table_of(document.get("evidence", {}), place.at("evidence")), place.at("evidence")
        ).arguments,
    )


def read_family(
    text: str, source: str, *, pattern: Callable[[str], PatternFactory], extended: Sequence[Family] = ()
) -> Family:
    """The family that `text` describes. `source`: where it stands; `extended`: what it extends, in order.

    `pattern`: gives the pattern registered under a name. Raises UsageError with the place of the mistake.
    """
    document, place = document_of(text, source), Place(source)
    only(document, _KEYS, place)
    name = text_of(document.get("name"), place.at("name"))
    base = _joined(extended)
    rules = [_rule(own, place.at("rule").at(at), pattern, name) for at, own in tables_of(document, "rule", place)]
    given = {**base.given, **numbers_of(document.get("given", {}), place.at("given"))}
    family = Family(
        name=name,
        title=text_of(document.get("title", ""), place.at("title")),
        rules=_merged(base.rules, rules, texts_of(document.get("drop", []), place.at("drop")), place),
        sizes=_more_ways(_sizes(document.get("sizes", {}), place.at("sizes")), base.sizes),
        given=given,
        values=given,
        limits={**base.limits, **_limits(document.get("limits", {}), place.at("limits"))},
        tensors={**base.tensors, **_templates(document.get("tensors", {}), place.at("tensors"))},
        evidence=_evidence(table_of(document.get("evidence", {}), place.at("evidence")), place.at("evidence")),
        styles={**base.styles, **_styles(document.get("style", {}), place.at("style"))},
        configs=more_parts(base.configs, config_parts(document.get("config", {}), place.at("config"), name)),
        tied=(*base.tied, *(_tied(own, place.at("tied").at(at)) for at, own in tables_of(document, "tied", place))),
        ignored=(*base.ignored, *texts_of(document.get("ignored", []), place.at("ignored"))),
        order=texts_of(document.get("order", list(base.order)), place.at("order")),
        kind_of=texts_of(document.get("kind_of", []), place.at("kind_of")),
        abstract=flag_of(document.get("abstract", False), place.at("abstract")),
        source=source,
    )
    aliases = aliases_by_rule(document.get("alias", {}), place.at("alias"))
    family = _with_aliases(family, aliases, place)
    for at, own in tables_of(document, "repeat", place):
        family = _repeated(family, own, place.at("repeat").at(at))
    return _checked(replace(family, rules=family.ordered()), place)


def _joined(families: Sequence[Family]) -> Family:
    """What several families say, taken together; a later one wins."""
    joined = Family(name="")
    for own in families:
        joined = replace(
            joined,
            rules=_merged(joined.rules, own.rules, (), Place(own.source)),
            sizes=_more_ways(joined.sizes, own.sizes),
            given={**joined.given, **own.given},
            limits={**joined.limits, **own.limits},
            tensors={**joined.tensors, **own.tensors},
            styles={**joined.styles, **own.styles},
            configs=more_parts(joined.configs, own.configs),
            tied=tuple(dict.fromkeys((*joined.tied, *own.tied))),
            ignored=tuple(dict.fromkeys((*joined.ignored, *own.ignored))),
            order=own.order or joined.order,
        )
    return joined


def _more_ways(
    first: Mapping[str, tuple[Expression, ...]], then: Mapping[str, tuple[Expression, ...]]
) -> dict[str, tuple[Expression, ...]]:
    """Ways to find each size: those of `first`, then those of `then`. Sizes that others need keep their place."""
    names = dict.fromkeys((*then, *first))
    return {name: tuple(dict.fromkeys((*first.get(name, ()), *then.get(name, ())))) for name in names}


def _merged(old: Sequence[Rule], new: Sequence[Rule], drop: Sequence[str], place: Place) -> tuple[Rule, ...]:
    """Rules of both; those of `new` stand in the place of old ones with the same template."""
    names = {rule.name for rule in old}
    unknown = [name for name in drop if name not in {own.text for own in names}]
    if unknown:
        raise place.at("drop").wrong("templates of rules that are extended", unknown)
    changed: dict[Template, list[Rule]] = {}
    for rule in new:
        changed.setdefault(rule.name, []).append(rule)
    kept: dict[Template, list[Rule]] = {}
    for rule in old:
        if rule.name.text not in drop:
            kept.setdefault(rule.name, []).append(rule)
    return tuple(rule for own in {**kept, **changed}.values() for rule in own)


def _rule(value: object, place: Place, pattern: Callable[[str], PatternFactory], family: str) -> Rule:
    table = table_of(value, place)
    only(table, _RULE_KEYS | set(_AXES), place)
    axes = tuple(_axis(axis, own, place.at(axis), pattern) for axis, own in table.items() if axis in _AXES)
    padded = table.get("padded")
    return Rule(
        name=template_of(table.get("name"), place.at("name")),
        axes=axes,
        when=expression_of(table["when"], place.at("when")) if "when" in table else None,
        meaning=text_of(table.get("meaning", ""), place.at("meaning")),
        buffer=flag_of(table.get("buffer", False), place.at("buffer")),
        shape=lengths_of(table.get("shape", []), place.at("shape")),
        padded=None if padded is None else dim_of(padded, place.at("padded")),
        aliases=alias_table(table.get("alias", {}), place.at("alias")),
        source=family,
    )


def _axis(axis: str, value: object, place: Place, pattern: Callable[[str], PatternFactory]) -> AxisRule:
    """`tp = "replicate"`, or `tp = { pattern = "shard", dim = 0 }`."""
    table = {"pattern": value} if isinstance(value, str) else table_of(value, place)
    name = text_of(table.get("pattern"), place.at("pattern"))
    options = {key: option_of(own, place.at(key)) for key, own in table.items() if key != "pattern"}
    if DIM in table:
        options[DIM] = dim_of(table[DIM], place.at(DIM))
    try:
        factory = pattern(name)
    except UsageError as error:
        raise UsageError(f"{place.path}: {error}") from error
    try:
        signature(factory).bind(**options)
    except TypeError as error:
        raise UsageError(f"{place.path}: the pattern {name!r} does not take these options: {error}") from error
    return AxisRule(axis=axis, pattern=name, factory=factory, options=options)


def _with_aliases(family: Family, aliases: Mapping[str, Mapping[str, tuple[Alias, ...]]], place: Place) -> Family:
    known = {rule.name.text for rule in family.rules}
    unknown = [template for template in aliases if template not in known]
    if unknown:
        raise place.at("alias").wrong("templates of rules", unknown)
    rules = tuple(replace(rule, aliases={**rule.aliases, **aliases.get(rule.name.text, {})}) for rule in family.rules)
    return replace(family, rules=rules)


def _repeated(family: Family, value: object, place: Place) -> Family:
    """The family and a copy of the rules whose names start with `rules`, under names that start with `as` instead.

    Aliases follow where they start in the same way, or as `[repeat.STYLE]` says (old start = new start).
    """
    table = table_of(value, place)
    old, new = text_of(table.get("rules"), place.at("rules")), text_of(table.get("as"), place.at("as"))
    starts = {
        style: {old: new, **{own: text_of(to, place.at(style).at(own)) for own, to in table_of(own, place).items()}}
        for style, own in table.items()
        if style not in ("rules", "as")
    }
    copies = []
    for rule in family.rules:
        if rule.name.text.startswith(old):
            aliases = {
                style: tuple(moved for own in ways if (moved := _moved(own, starts.get(style, {old: new}))))
                for style, ways in rule.aliases.items()
            }
            name = template_of(new + rule.name.text.removeprefix(old), place.at("as"))
            copies.append(replace(rule, name=name, aliases={style: ways for style, ways in aliases.items() if ways}))
    order = tuple(new + own.removeprefix(old) for own in family.order if own.startswith(old))
    together = max(len(family.rules) + len(copies), len(family.order) + len(order))
    if together > _MOST_RULES:
        raise place.wrong(f"at most {_MOST_RULES:,} rules, those that are repeated counted", together)
    return replace(family, rules=(*family.rules, *copies), order=(*family.order, *order))


def _moved(alias: Alias, starts: Mapping[str, str]) -> Alias | None:
    """The alias with other starts of its names; None when they start in none of these ways."""
    names = []
    for name in alias.names:
        start = next((own for own in starts if name.startswith(own)), None)
        if start is None:
            return None
        names.append(starts[start] + name.removeprefix(start))
    return replace(alias, names=tuple(names))


def _checked(family: Family, place: Place) -> Family:
    """The family, when all that it mentions is there; one that is only extended may lean on what others bring."""
    if family.abstract:
        return family
    for rule in family.rules:
        unknown = [style for style in rule.aliases if style not in family.styles]
        if unknown:
            raise place.wrong(f"styles that are described ({', '.join(family.styles)}), for {rule.name}", unknown)
    for style in family.styles.values():
        _check_style(style, family.styles, place.at("style").at(style.name))
    templates = {rule.name.text for rule in family.rules}
    for rule in family.rules:
        unknown = [own for ways in rule.aliases.values() for way in ways for own in way.beside if own not in templates]
        if unknown:
            raise place.wrong(f"templates of rules, beside which {rule.name} stands", unknown)
    names = {*family.sizes, *family.given, *_AXES, DIM}
    for rule in family.rules:
        if () in rule.aliases.values() and not rule.buffer:
            raise place.wrong("a name in every style of [alias]: buffers alone may have none", rule.name.text)
        own = [e for axis in rule.axes for e in axis.expressions] + ([rule.when] if rule.when else [])
        own += [length for length in rule.shape if isinstance(length, Expression)]
        unknown = sorted({name for expression in own for name in expression.names} - names)
        if unknown:
            raise place.wrong(f"names under [sizes] or [given], for {rule}", unknown)
    return family


def _check_style(style: Style, styles: Mapping[str, Style], place: Place) -> None:
    """Refuse a style that is like one which is not described, or like itself at some remove."""
    alike = [style.name]
    like = style.like
    while like not in (None, CANONICAL):
        if like not in styles:
            raise place.at("like").wrong("a style that is described", like)
        alike.append(like)
        if like in alike[:-1] or len(alike) > _MOST_STYLES:
            raise place.at("like").wrong(f"at most {_MOST_STYLES} styles, one like another in no circle", alike)
        like = styles[like].like


def _sizes(value: object, place: Place) -> dict[str, tuple[Expression, ...]]:
    found = {}
    for name, own in table_of(value, place).items():
        ways = own if isinstance(own, list) else [own]
        found[name] = tuple(expression_of(way, place.at(name)) for way in ways)
    return found


def _limits(value: object, place: Place) -> dict[str, Expression]:
    return {name: expression_of(own, place.at(name)) for name, own in table_of(value, place).items()}


def _evidence(table: Mapping[str, object], place: Place) -> Evidence:
    only(table, frozenset({"names", "absent", "arguments"}), place)
    return Evidence(
        names=texts_of(table.get("names", []), place.at("names")),
        absent=texts_of(table.get("absent", []), place.at("absent")),
        arguments=dict(table_of(table.get("arguments", {}), place.at("arguments"))),
    )


def _styles(value: object, place: Place) -> dict[str, Style]:
    found = {}
    for name, own in table_of(value, place).items():
        here = place.at(name)
        table = table_of(own, here)
        only(table, frozenset({"like", "rewrite", "modules"}), here)
        like = table.get("like")
        rewrite = {
            part: texts_of(others if isinstance(others, list) else [others], here.at("rewrite").at(part))
            for part, others in table_of(table.get("rewrite", {}), here.at("rewrite")).items()
        }
        found[name] = Style(
            name=name,
            like=None if like is None else text_of(like, here.at("like")),
            rewrite=rewrite,
            modules=tuple(text_of(table.get("modules", ""), here.at("modules")).split()),
        )
    return found


def _tied(value: object, place: Place) -> Tied:
    table = table_of(value, place)
    only(table, frozenset({"name", "to", "when"}), place)
    return Tied(
        name=template_of(table.get("name"), place.at("name")).text,
        to=template_of(table.get("to"), place.at("to")).text,
        when=expression_of(table["when"], place.at("when")) if "when" in table else None,
    )


def _templates(value: object, place: Place) -> dict[str, Template]:
    return {name: template_of(own, place.at(name)) for name, own in table_of(value, place).items()}
