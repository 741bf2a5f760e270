"""Families and their rules as tables, and what they say about a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from ucp.checks.explain import NO_RULE, Explained, FamilyReport
from ucp.core.text.page import Section, facts, lines
from ucp.core.text.units import shape_text
from ucp.errors import counted
from ucp.families.family import CANONICAL, Family
from ucp.families.rule import Rule
from ucp_cli.pages.render import table

__all__ = ["family_page", "family_table", "report_page"]

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
    return [
        facts(
            [
                ("family", f"{family.name}: {family.title}"),
                ("file", family.source),
                ("preferred to", ", ".join(family.kind_of)),
                ("recognised by", ", ".join(evidence.names)),
                ("and not by", ", ".join(evidence.absent)),
                ("with", ", ".join(f"{name} = {value!r}" for name, value in evidence.arguments.items())),
                ("given", ", ".join(f"{name} = {value}" for name, value in family.given.items())),
                ("names in", ", ".join((CANONICAL, *family.styles))),
            ]
        ),
        table("Rules", columns, [_rule_row(family, rule, style) for rule in family.rules]),
        lines("Sizes and flags, and where they are found", found),
        lines("Tied", [f"{tie.name} = {tie.to}{f' when {tie.when}' if tie.when else ''}" for tie in family.tied]),
    ]


def _rule_row(family: Family, rule: Rule, style: str | None) -> tuple[str, ...]:
    when = "" if rule.when is None else str(rule.when)
    names = [", ".join(family.written(rule, style)) or "-"] if style else []
    return (rule.name.text, *names, lies(rule), when, rule.meaning)


def lies(rule: Rule) -> str:
    """How a rule's parameters lie over the mesh."""
    return "; ".join(map(str, rule.axes)) or "one owner"


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
    yield table("Parameters", ("name", ">tensors", "shape", "lies", "meaning"), list(_parameter_rows(report)))
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


def _parameter_rows(report: FamilyReport) -> Iterator[tuple[str, ...]]:
    """A row per rule, style and layout; names of other layers and experts are the same row."""
    return _rows(own for own in report.parameters if own.rule is not None)


def _rows(parameters: Iterable[Explained]) -> Iterator[tuple[str, ...]]:
    rows: dict[tuple[str, ...], list[Explained]] = {}
    for own in parameters:
        rows.setdefault((own.template, str(own.rule), *own.patterns), []).append(own)
    for members in rows.values():
        first = members[0]
        shapes = list(dict.fromkeys(shape_text(own.global_shape) for own in members))
        shown = ", ".join(shapes[:2]) + (", ..." if len(shapes) > 2 else "")
        yield first.template, str(len(members)), shown, _lie(first), _meaning(first)


def _lie(own: Explained) -> str:
    return "; ".join(own.patterns) or ("whole" if own.rule is None else "one owner")


def _meaning(own: Explained) -> str:
    """What a parameter is, and what it is called by the family where that is something else."""
    if own.rule is None or own.style == CANONICAL:
        return own.rule.meaning if own.rule else ""
    part = "" if own.part is None else f" (part {own.part + 1})"
    turned = f" (dims in the order {list(own.order)})" if own.order else ""
    return f"{own.rule.name}{part}{turned}: {own.rule.meaning}"


def _some(texts: Iterable[str]) -> Sequence[str]:
    shown = list(texts)
    return (
        shown if len(shown) <= _MOST_PROBLEMS else [*shown[:_MOST_PROBLEMS], f"(+{len(shown) - _MOST_PROBLEMS} more)"]
    )
