"""Reads the TOML text of a model family into values; every mistake is named with its place.

A family starts from those that it `extends`, in order. Its own entries override theirs: a rule replaces all inherited
rules with the same template.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature

from ucp.core.text.typed import convert
from ucp.errors import UsageError
from ucp.families.expression import Expression
from ucp.families.family import Family
from ucp.families.naming import CANONICAL, Style, Tied
from ucp.families.rule import DIM, Alias, AxisRule, PatternFactory, Rule
from ucp.families.template import Template
from ucp.families.toml.config import make_part, merge_parts
from ucp.families.toml.document import (
    Dim,
    FamilyDocument,
    PatternOption,
    RuleTable,
    error_context,
    make_aliases,
    make_expression,
    make_expressions,
    make_lengths,
    make_option,
    read_document,
)

_AXES = ("pp", "ep", "etp", "tp", "cp", "dp")


def read_header(text: str, source: str) -> FamilyDocument:
    """What a rules file says, before rules are made of it. Raises UsageError."""
    document: FamilyDocument = read_document(text, source, FamilyDocument)  # lru_cache loses the type
    return document


def read_family(
    text: str, source: str, *, pattern: Callable[[str], PatternFactory], extended: Sequence[Family] = ()
) -> Family:
    """The family that `text` describes. `source`: its file; `extended`: families that it extends, in order.

    `pattern`: gives the pattern registered under a name. Raises UsageError with the place of the mistake.
    """
    document = read_header(text, source)
    base = _join_families(extended)
    rules = []
    for number, table in enumerate(document.rule):
        with error_context(f"{source}: rule[{number}]"):
            rules.append(_rule(table, pattern, document.name))
    with error_context(source):
        constants = {**base.constants, **{name: int(number) for name, number in document.constants.items()}}
        family = Family(
            name=document.name,
            title=document.title,
            rules=_merged(base.rules, rules, document.drop),
            sizes=_more_ways(
                {name: make_expressions(formulas) for name, formulas in document.sizes.items()}, base.sizes
            ),
            constants=constants,
            values=constants,
            limits={**base.limits, **{name: make_expression(limit) for name, limit in document.limits.items()}},
            tensors={**base.tensors, **{name: Template(text) for name, text in document.tensors.items()}},
            evidence=document.evidence,
            styles={**base.styles, **_styles(document)},
            configs=merge_parts(
                base.configs,
                {
                    style: tuple(make_part(table, document.name) for table in tables)
                    for style, tables in document.config.items()
                },
            ),
            tied=(
                *base.tied,
                *(
                    Tied(
                        name=Template(table.name).text,
                        to=Template(table.to).text,
                        when=None if table.when is None else make_expression(table.when),
                    )
                    for table in document.tied
                ),
            ),
            ignored=(*base.ignored, *document.ignored),
            required=_required(base, document),
            order=base.order if document.order is None else document.order,
            kind_of=document.kind_of,
            abstract=document.abstract,
            source=source,
        )
        family = _with_aliases(family, document)
        for repeat in document.repeat:
            family = _repeated(family, repeat)
        return _checked(replace(family, rules=family.sort_rules()))


def _join_families(families: Sequence[Family]) -> Family:
    """The entries of several families together; those of a later family win."""
    joined = Family(name="")
    for family in families:
        joined = replace(
            joined,
            rules=_merged(joined.rules, family.rules, ()),
            sizes=_more_ways(joined.sizes, family.sizes),
            constants={**joined.constants, **family.constants},
            limits={**joined.limits, **family.limits},
            tensors={**joined.tensors, **family.tensors},
            styles={**joined.styles, **family.styles},
            configs=merge_parts(joined.configs, family.configs),
            tied=tuple(dict.fromkeys((*joined.tied, *family.tied))),
            ignored=tuple(dict.fromkeys((*joined.ignored, *family.ignored))),
            required=family.required or joined.required,
            order=family.order or joined.order,
        )
    return joined


def _more_ways(
    first: Mapping[str, tuple[Expression, ...]], then: Mapping[str, tuple[Expression, ...]]
) -> dict[str, tuple[Expression, ...]]:
    """Formulas for each size: those of `first`, then those of `then`. Sizes that others need stay before them."""
    names = dict.fromkeys((*then, *first))
    return {name: tuple(dict.fromkeys((*first.get(name, ()), *then.get(name, ())))) for name in names}


def _merged(old: Sequence[Rule], new: Sequence[Rule], drop: Sequence[str]) -> tuple[Rule, ...]:
    """Rules of both; those of `new` replace old ones with the same template."""
    _check_known("drop: templates of rules that are extended", drop, {rule.name.text for rule in old})
    changed: dict[Template, list[Rule]] = {}
    for rule in new:
        changed.setdefault(rule.name, []).append(rule)
    remaining: dict[Template, list[Rule]] = {}
    for rule in old:
        if rule.name.text not in drop:
            remaining.setdefault(rule.name, []).append(rule)
    return tuple(rule for rules in {**remaining, **changed}.values() for rule in rules)


def _required(base: Family, document: FamilyDocument) -> tuple[str, ...]:
    """Templates under `required`, else the inherited ones of which the family still has the rules."""
    if document.required is None:
        return tuple(text for text in base.required if text not in document.drop)
    return tuple(Template(text).text for text in document.required)


def _check_known(what: str, names: Iterable[str], known: Container[str]) -> None:
    """Raise ValueError with all names that are not known. `what`: the place of the names, and what is expected."""
    unknown = sorted(name for name in names if name not in known)
    if unknown:
        place, _, expected = what.rpartition(": ")
        raise ValueError(f"{place}{': ' if place else ''}expected {expected}; got {unknown}")


def _rule(table: dict[str, object], pattern: Callable[[str], PatternFactory], family: str) -> Rule:
    rule = convert(table, RuleTable)
    axes: dict[str, str | dict[str, PatternOption]] = {axis: getattr(rule, axis) for axis in table if axis in _AXES}
    return Rule(
        name=Template(rule.name),
        axes=tuple(_axis(axis, options, pattern) for axis, options in axes.items()),
        when=None if rule.when is None else make_expression(rule.when),
        meaning=rule.meaning,
        buffer=rule.buffer,
        shape=make_lengths(rule.shape),
        padded=rule.padded,
        aliases={style: make_aliases(tables) for style, tables in rule.alias.items()},
        source=family,
    )


def _axis(axis: str, table: str | dict[str, PatternOption], pattern: Callable[[str], PatternFactory]) -> AxisRule:
    """`tp = "replicate"`, or `tp = { pattern = "shard", dim = 0 }`."""
    with error_context(axis):
        values = dict(table) if isinstance(table, dict) else {"pattern": table}
        name = values.pop("pattern", None)
        if not isinstance(name, str):
            raise UsageError(f"expected the name of a pattern; got {name!r}")
        options = {key: make_option(value) for key, value in values.items()}
        if DIM in values:
            with error_context(DIM):
                convert(values[DIM], Dim)
        factory = pattern(name)
        try:
            signature(factory).bind(**options)
        except TypeError as error:
            raise ValueError(f"the pattern {name!r} does not take these options: {error}") from error
    return AxisRule(axis=axis, pattern=name, factory=factory, options=options)


def _with_aliases(family: Family, document: FamilyDocument) -> Family:
    """The family with the aliases that `[alias.STYLE]` gives to rules, by their templates."""
    aliases: dict[str, dict[str, tuple[Alias, ...]]] = {}
    for style, names in document.alias.items():
        for template, tables in names.items():
            with error_context(f"alias: {style}: {template}"):
                aliases.setdefault(template, {})[style] = make_aliases(tables)
    _check_known("alias: templates of rules", aliases, {rule.name.text for rule in family.rules})
    rules = tuple(replace(rule, aliases={**rule.aliases, **aliases.get(rule.name.text, {})}) for rule in family.rules)
    return replace(family, rules=rules)


def _repeated(family: Family, table: Mapping[str, str | dict[str, str]]) -> Family:
    """The family and a copy of the rules whose names start with `rules`, under names that start with `as` instead.

    Aliases are copied if they start in the same way, or as the entry of their style says (old start = new start).
    """
    old, new = table.get("rules"), table.get("as")
    if not isinstance(old, str) or not isinstance(new, str):
        raise UsageError(f"repeat: expected rules and as, both text; got {dict(table)}")
    starts = {
        style: {old: new, **extra_starts} for style, extra_starts in table.items() if isinstance(extra_starts, dict)
    }
    copies = []
    for rule in family.rules:
        if rule.name.text.startswith(old):
            aliases = {
                style: tuple(
                    moved for way in aliases_of_style if (moved := _move_names(way, starts.get(style, {old: new})))
                )
                for style, aliases_of_style in rule.aliases.items()
            }
            name = Template(new + rule.name.text.removeprefix(old))
            copies.append(
                replace(
                    rule,
                    name=name,
                    aliases={
                        style: aliases_of_style for style, aliases_of_style in aliases.items() if aliases_of_style
                    },
                )
            )
    order = tuple(new + prefix.removeprefix(old) for prefix in family.order if prefix.startswith(old))
    return replace(family, rules=(*family.rules, *copies), order=(*family.order, *order))


def _move_names(alias: Alias, starts: Mapping[str, str]) -> Alias | None:
    """The alias with other starts of its names; None if a name starts in none of these ways."""
    names = []
    for name in alias.names:
        start = next((known_start for known_start in starts if name.startswith(known_start)), None)
        if start is None:
            return None
        names.append(starts[start] + name.removeprefix(start))
    return replace(alias, names=tuple(names))


def _checked(family: Family) -> Family:
    """The family. Raises ValueError if it mentions what it does not have; an abstract family may rely on others."""
    if family.abstract:
        return family
    for style in family.styles.values():
        _check_style(style, family.styles)
    templates = {rule.name.text for rule in family.rules}
    _check_known("required: templates of rules", family.required, templates)
    names = {*family.sizes, *family.constants, *_AXES, DIM}
    for rule in family.rules:
        styles = ", ".join(family.styles)
        _check_known(f"styles that are described ({styles}), for {rule.name}", rule.aliases, family.styles)
        alongside = [template for aliases in rule.aliases.values() for alias in aliases for template in alias.alongside]
        _check_known(f"templates of rules, beside which {rule.name} stands", alongside, templates)
        if () in rule.aliases.values() and not rule.buffer:
            raise ValueError(f"expected a name in every style of [alias]: buffers alone may have none; got {rule.name}")
        formulas = [e for axis in rule.axes for e in axis.expressions] + ([rule.when] if rule.when else [])
        formulas += [length for length in rule.shape if isinstance(length, Expression)]
        used = {name for formula in formulas for name in formula.names}
        _check_known(f"names under [sizes] or [given], for {rule}", used, names)
    return family


def _check_style(style: Style, styles: Mapping[str, Style]) -> None:
    """Raise ValueError for a style that is `like` an undescribed one, or like itself through others."""
    alike = [style.name]
    like = style.like
    while like not in (None, CANONICAL):
        alike.append(like)
        _check_known(f"style: {style.name}: like: a style that is described", [like], styles)
        if like in alike[:-1]:
            raise ValueError(
                f"style: {style.name}: like: expected styles that are not like one another in a circle; got {alike}"
            )
        like = styles[like].like


def _styles(document: FamilyDocument) -> dict[str, Style]:
    return {
        name: Style(
            name=name,
            like=table.like,
            rewrite={
                part: (replacements,) if isinstance(replacements, str) else tuple(replacements)
                for part, replacements in table.rewrite.items()
            },
            modules=tuple(table.modules.split()),
            has_all_names=table.has_all_names,
        )
        for name, table in document.style.items()
    }
