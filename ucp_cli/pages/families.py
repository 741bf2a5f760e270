"""`ucp patterns`: families and their rules, and what they say about a checkpoint, as pages and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from ucp.checks.explain import NO_RULE, ExplainedParameter, FamilyReport
from ucp.core.text.page import Section, facts, lines
from ucp.core.text.units import shape_text
from ucp.errors import format_count
from ucp.families.family import Family
from ucp.families.naming import CANONICAL
from ucp.families.rule import Alias, Rule
from ucp_cli.pages.render import table

_MOST_PROBLEMS = 20


def family_table(families: Iterable[Family]) -> RenderableType | None:
    """A row per family."""
    rows = [(family.name, family.title, str(len(family.rules)), family.source) for family in families]
    return table("Families", ("name", "what it is", ">rules", "file"), rows)


def family_page(family: Family, style: str | None) -> list[Section | RenderableType | None]:
    """Everything in a family. `style`: naming style in which names are shown beside the canonical ones."""
    evidence = family.evidence
    sizes = [f"{name} = {' or else '.join(map(str, sources))}" for name, sources in family.sizes.items()]
    columns = ("name", *([style] if style else []), "layout", "when", "meaning")
    rows = [
        (
            rule.name.text,
            *([", ".join(family.written_names(rule, style)) or "-"] if style else []),
            "; ".join(map(str, rule.axes)) or "not cut",
            "" if rule.when is None else str(rule.when),
            rule.meaning,
        )
        for rule in family.rules
    ]
    return [
        facts(
            [
                ("family", f"{family.name}: {family.title}"),
                ("file", family.source),
                ("preferred to", ", ".join(family.kind_of)),
                ("needs names", ", ".join(evidence.names)),
                ("excludes names", ", ".join(evidence.absent)),
                ("needs arguments", ", ".join(f"{name} = {value!r}" for name, value in evidence.arguments.items())),
                ("always has", ", ".join(family.required)),
                ("fixed sizes", ", ".join(f"{name} = {value}" for name, value in family.constants.items())),
                ("styles", ", ".join((CANONICAL, *family.styles))),
            ]
        ),
        table("Rules", columns, rows),
        lines("Sizes and flags, and where they are found", sizes),
        lines("Tied", [f"{tie.name} = {tie.to}{f' when {tie.when}' if tie.when else ''}" for tie in family.tied]),
    ]


def report_page(report: FamilyReport) -> Iterator[Section | RenderableType | None]:
    """What a family says about a checkpoint: a row per rule that matches names, then what is wrong."""
    if report.family is None:
        yield from _recorded_page(report)
        return
    wrong = [parameter for parameter in report.parameters if parameter.problem]
    without = [parameter for parameter in wrong if parameter.problem == NO_RULE]
    undecided = [parameter for parameter in wrong if parameter.rule is None and parameter.problem != NO_RULE]
    verdict = "every parameter has a rule and fits it" if report.ok else f"{len(wrong)} do not fit"
    yield Text(f"{report.path}: {format_count(len(report.parameters), 'parameter')}, {verdict}")
    yield facts(
        [
            ("format", report.format),
            ("family", f"{report.family.name}: {report.family.title}"),
            ("evidence", ", ".join(report.reasons)),
            ("sizes", ", ".join(f"{name}={value}" for name, value in report.family.values.items())),
        ]
    )
    rows = list(_rows(parameter for parameter in report.parameters if parameter.rule is not None))
    yield table("Parameters", ("name", ">tensors", "shape", "layout", "meaning"), rows)
    yield lines(
        "Without a rule", _some(f"{parameter.name} {shape_text(parameter.global_shape)}" for parameter in without)
    )
    yield lines("With several rules", _some(parameter.problem for parameter in undecided))
    misfits = (parameter.problem for parameter in wrong if parameter.rule is not None)
    yield lines("Not as their rule says", _some(misfits))
    yield lines("Rules that matched nothing", list(dict.fromkeys(str(rule.name) for rule in report.unused)))


def _recorded_page(report: FamilyReport) -> Iterator[Section | RenderableType | None]:
    """The layout that a checkpoint records: in which files, and a row per kind of parameter."""
    count = format_count(len(report.parameters), "parameter")
    yield Text(f"{report.path}: {count}; no family is needed, the checkpoint records their layout")
    yield facts([("format", report.format), ("family", "none knows these names, and none is needed")])
    yield table("Recorded layout", ("axis", "in"), list(report.recorded_in.items()))
    rows = [row[:4] for row in _rows(report.parameters)]
    yield table("Parameters", ("name", ">tensors", "shape", "layout"), rows)


def _rows(parameters: Iterable[ExplainedParameter]) -> Iterator[tuple[str, ...]]:
    """A row per rule, style and layout; names of other layers and experts are the same row."""
    rows: dict[tuple[str, ...], list[ExplainedParameter]] = {}
    for parameter in parameters:
        rows.setdefault((parameter.template, str(parameter.rule), *parameter.patterns), []).append(parameter)
    for members in rows.values():
        first = members[0]
        shapes = list(dict.fromkeys(shape_text(parameter.global_shape) for parameter in members))
        shown = ", ".join(shapes[:2]) + (", ..." if len(shapes) > 2 else "")
        layout = "; ".join(first.patterns) or ("whole" if first.rule is None else "not cut")
        yield first.template, str(len(members)), shown, layout, _meaning(first)


def _meaning(parameter: ExplainedParameter) -> str:
    """What a parameter is, preceded by its canonical name in the family if that differs from its name."""
    if parameter.rule is None or parameter.style == CANONICAL:
        return parameter.rule.meaning if parameter.rule else ""
    part = "" if parameter.part is None else f" (part {parameter.part + 1})"
    turned = f" (dims in the order {list(parameter.order)})" if parameter.order else ""
    return f"{parameter.rule.name}{part}{turned}: {parameter.rule.meaning}"


def _some(texts: Iterable[str]) -> Sequence[str]:
    shown = list(texts)
    more = len(shown) - _MOST_PROBLEMS
    return [*shown[:_MOST_PROBLEMS], *([f"(+{more} more)"] if more > 0 else [])]


def families_document(families: Sequence[Family], patterns: Sequence[str]) -> dict[str, object]:
    """What `ucp patterns list` found."""
    return {
        "schema": "ucp.patterns-list/1",
        "families": [
            {"name": family.name, "title": family.title, "rules": len(family.rules), "source": family.source}
            for family in families
        ],
        "patterns": list(patterns),
    }


def family_document(family: Family) -> dict[str, object]:
    """What `ucp patterns show` shows."""
    return {
        "schema": "ucp.patterns-show/1",
        "name": family.name,
        "title": family.title,
        "source": family.source,
        "kind_of": list(family.kind_of),
        "evidence": {
            "names": list(family.evidence.names),
            "absent": list(family.evidence.absent),
            "arguments": dict(family.evidence.arguments),
        },
        "required": list(family.required),
        "given": dict(family.constants),
        "sizes": {name: [str(way) for way in sources] for name, sources in family.sizes.items()},
        "styles": list(family.styles),
        "rules": [_rule_document(rule) for rule in family.rules],
        "tied": [{"name": tie.name, "to": tie.to, "when": str(tie.when or "") or None} for tie in family.tied],
    }


def report_document(report: FamilyReport) -> dict[str, object]:
    """What `ucp patterns check` found."""
    return {
        "schema": "ucp.patterns-check/1",
        "ok": report.ok,
        "path": report.path,
        "format": report.format,
        "family": None if report.family is None else report.family.name,
        "reasons": list(report.reasons),
        "sizes": {} if report.family is None else dict(report.family.values),
        "recorded_in": dict(report.recorded_in),
        "parameters": {parameter.name: _parameter_document(parameter) for parameter in report.parameters},
        "unused": list(dict.fromkeys(str(rule.name) for rule in report.unused)),
    }


def _parameter_document(parameter: ExplainedParameter) -> dict[str, object]:
    return {
        "shape": list(parameter.global_shape),
        "canonical": parameter.canonical or None,
        "style": parameter.style or None,
        "template": parameter.template or None,
        "part": parameter.part,
        "order": list(parameter.order),
        "rule": None if parameter.rule is None else str(parameter.rule.name),
        "meaning": None if parameter.rule is None else parameter.rule.meaning,
        "patterns": list(parameter.patterns),
        "problem": parameter.problem or None,
    }


def _rule_document(rule: Rule) -> dict[str, object]:
    return {
        "name": str(rule.name),
        "when": None if rule.when is None else str(rule.when),
        "meaning": rule.meaning,
        "buffer": rule.buffer,
        "padded": rule.padded,
        "axes": [
            {"axis": axis.axis, "pattern": axis.pattern, "options": {k: _plain(v) for k, v in axis.options.items()}}
            for axis in rule.axes
        ],
        "aliases": {
            style: [_alias_document(alias) for alias in spellings] for style, spellings in rule.aliases.items()
        },
        "source": rule.source,
    }


def _alias_document(alias: Alias) -> dict[str, object]:
    return {
        "names": list(alias.names),
        "dim": alias.dim,
        "groups": None if alias.groups is None else str(alias.groups),
        "blocks": _plain(alias.blocks),
        "view": _plain(alias.view),
        "order": list(alias.order),
        "when": None if alias.when is None else str(alias.when),
        "beside": list(alias.alongside),
    }


def _plain(option: object) -> object:
    """A number as it is, an expression as text."""
    if isinstance(option, tuple):
        return [_plain(member) for member in option]
    return option if isinstance(option, int) else str(option)
