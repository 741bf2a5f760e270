"""What `ucp patterns ... --json` prints."""

from __future__ import annotations

from collections.abc import Sequence

from ucp.checks.explain import Explained, FamilyReport
from ucp.families.family import Family
from ucp.families.rule import Alias, Rule

__all__ = ["families_document", "family_document", "report_document"]


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
        "given": dict(family.given),
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


def _explained(own: Explained) -> dict[str, object]:
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
        "beside": list(alias.beside),
    }


def _plain(option: object) -> object:
    """A number as it is, an expression as text."""
    if isinstance(option, tuple):
        return [_plain(own) for own in option]
    return option if isinstance(option, int) else str(option)
