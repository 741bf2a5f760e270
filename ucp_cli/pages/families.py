"""`ucp patterns`: families and their rules, and what they say about a checkpoint, as pages and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from ucp.checks.explain import NO_RULE, ExplainedParameter, FamilyReport
from ucp.core.text.page import Section, facts, lines
from ucp.core.text.units import shape_text
from ucp.errors import counted
from ucp.families.family import Family
from ucp.families.naming import CANONICAL
from ucp.families.rule import Alias, Rule
from ucp_cli.pages.render import table

_MOST_PROBLEMS = 20


def family_table(families: Iterable[Family]) -> RenderableType | None:
    """A row per family."""
    rows = [(own.name, own.title, str(len(own.rules)), own.source) for own in families]
    return table("Families", ("name", "what it is", ">rules", "file"), rows)


def family_page(family: Family, style: str | None) -> list[Section | RenderableType | None]:
    """Everything that a family says. `style`: naming style to show the names in, beside the canonical ones."""
    evidence = family.evidence
    found = [f"{name} = {' or else '.join(map(str, ways))}" for name, ways in family.sizes.items()]
    columns = ("name", *([style] if style else []), "lies", "when", "meaning")
    rows = [
        (
            rule.name.text,
            *([", ".join(family.written_names(rule, style)) or "-"] if style else []),
            "; ".join(map(str, rule.axes)) or "one owner",
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
                ("recognised by", ", ".join(evidence.names)),
                ("and not by", ", ".join(evidence.absent)),
                ("with", ", ".join(f"{name} = {value!r}" for name, value in evidence.arguments.items())),
                ("given", ", ".join(f"{name} = {value}" for name, value in family.constants.items())),
                ("names in", ", ".join((CANONICAL, *family.styles))),
            ]
        ),
        table("Rules", columns, rows),
        lines("Sizes and flags, and where they are found", found),
        lines("Tied", [f"{tie.name} = {tie.to}{f' when {tie.when}' if tie.when else ''}" for tie in family.tied]),
    ]


def report_page(report: FamilyReport) -> Iterator[Section | RenderableType | None]:
    """What a family says about a checkpoint: a row per rule that names fell under, then what is wrong."""
    if report.family is None:
        yield from _recorded_page(report)
        return
    wrong = [own for own in report.parameters if own.problem]
    without = [own for own in wrong if own.problem == NO_RULE]
    undecided = [own for own in wrong if own.rule is None and own.problem != NO_RULE]
    verdict = "every parameter has a rule and fits it" if report.ok else f"{len(wrong)} do not fit"
    yield Text(f"{report.path}: {counted(len(report.parameters), 'parameter')}, {verdict}")
    yield facts(
        [
            ("format", report.format),
            ("family", f"{report.family.name}: {report.family.title}"),
            ("because of", ", ".join(report.reasons)),
            ("sizes", ", ".join(f"{name}={value}" for name, value in report.family.values.items())),
        ]
    )
    ruled = list(_rows(own for own in report.parameters if own.rule is not None))
    yield table("Parameters", ("name", ">tensors", "shape", "lies", "meaning"), ruled)
    yield lines("Without a rule", _some(f"{own.name} {shape_text(own.global_shape)}" for own in without))
    yield lines("Of several rules", _some(own.problem for own in undecided))
    yield lines("Not as their rule says", _some(own.problem for own in wrong if own.rule is not None))
    yield lines("Rules that matched nothing", list(dict.fromkeys(str(rule.name) for rule in report.unused)))


def _recorded_page(report: FamilyReport) -> Iterator[Section | RenderableType | None]:
    """What a checkpoint says of itself: where it stands, and a row per kind of parameter."""
    count = counted(len(report.parameters), "parameter")
    yield Text(f"{report.path}: {count}; no family is needed, the checkpoint records how they lie")
    yield facts([("format", report.format), ("family", "none knows these names, and none is needed")])
    yield table("Recorded", ("axis", "in"), list(report.recorded_in.items()))
    rows = [row[:4] for row in _rows(report.parameters)]
    yield table("Parameters", ("name", ">tensors", "shape", "lies"), rows)


def _rows(parameters: Iterable[ExplainedParameter]) -> Iterator[tuple[str, ...]]:
    """A row per rule, style and layout; names of other layers and experts are the same row."""
    rows: dict[tuple[str, ...], list[ExplainedParameter]] = {}
    for own in parameters:
        rows.setdefault((own.template, str(own.rule), *own.patterns), []).append(own)
    for members in rows.values():
        first = members[0]
        shapes = list(dict.fromkeys(shape_text(own.global_shape) for own in members))
        shown = ", ".join(shapes[:2]) + (", ..." if len(shapes) > 2 else "")
        lies = "; ".join(first.patterns) or ("whole" if first.rule is None else "one owner")
        yield first.template, str(len(members)), shown, lies, _meaning(first)


def _meaning(own: ExplainedParameter) -> str:
    """What a parameter is, and what it is called by the family where that is something else."""
    if own.rule is None or own.style == CANONICAL:
        return own.rule.meaning if own.rule else ""
    part = "" if own.part is None else f" (part {own.part + 1})"
    turned = f" (dims in the order {list(own.order)})" if own.order else ""
    return f"{own.rule.name}{part}{turned}: {own.rule.meaning}"


def _some(texts: Iterable[str]) -> Sequence[str]:
    shown = list(texts)
    more = len(shown) - _MOST_PROBLEMS
    return [*shown[:_MOST_PROBLEMS], *([f"(+{more} more)"] if more > 0 else [])]


def families_document(families: Sequence[Family], patterns: Sequence[str]) -> dict[str, object]:
    """What `ucp patterns list` found."""
    return {
        "schema": "ucp.patterns-list/1",
        "families": [
            {"name": own.name, "title": own.title, "rules": len(own.rules), "source": own.source} for own in families
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
        "given": dict(family.constants),
        "sizes": {name: [str(way) for way in ways] for name, ways in family.sizes.items()},
        "styles": list(family.styles),
        "rules": [_rule(rule) for rule in family.rules],
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
        "parameters": {own.name: _explained(own) for own in report.parameters},
        "unused": list(dict.fromkeys(str(rule.name) for rule in report.unused)),
    }


def _explained(own: ExplainedParameter) -> dict[str, object]:
    return {
        "shape": list(own.global_shape),
        "canonical": own.canonical or None,
        "style": own.style or None,
        "template": own.template or None,
        "part": own.part,
        "order": list(own.order),
        "rule": None if own.rule is None else str(own.rule.name),
        "meaning": None if own.rule is None else own.rule.meaning,
        "patterns": list(own.patterns),
        "problem": own.problem or None,
    }


def _rule(rule: Rule) -> dict[str, object]:
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
        "aliases": {style: [_alias(alias) for alias in ways] for style, ways in rule.aliases.items()},
        "source": rule.source,
    }


def _alias(alias: Alias) -> dict[str, object]:
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
        return [_plain(own) for own in option]
    return option if isinstance(option, int) else str(option)
