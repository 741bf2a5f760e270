"""Explains what the rules of a model family say about a checkpoint: the rule of each parameter, and what fits no rule.

Works on the index of any format; it uses only names and global shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ucp.contract.model import run_arguments
from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import choose_family, recognise
from ucp.core.index import AtomIndex, Index
from ucp.errors import FamilyError, UnknownFamilyError
from ucp.families.family import Family
from ucp.families.naming import ParsedName
from ucp.families.rule import Rule
from ucp.families.template import kind

NO_RULE = "no rule"
"""The problem of a name that no rule covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedParameter:
    """One parameter, and what a family says about it."""

    name: str
    """Name in the checkpoint."""
    global_shape: tuple[int, ...]
    """Elements per dim."""
    canonical: str = ""
    """Canonical name, with placeholders for numbers that the name does not have; empty without a rule."""
    style: str = ""
    """Naming style of the name; empty without a rule."""
    template: str = ""
    """Template of that style that the name matches; empty without a rule."""
    part: int | None = None
    """Which part of the canonical tensor it is; None if it is the complete tensor."""
    rule: Rule | None = None
    """Its rule."""
    patterns: tuple[str, ...] = ()
    """How it is split over each axis at the degrees of the checkpoint, for example "tp: shard(dim=0)"."""
    problem: str = ""
    """What is wrong; empty if nothing is."""
    order: tuple[int, ...] = ()
    """Dims of the stored tensor in the order of the rule's dims; empty if the orders agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReport:
    """What a family says about a checkpoint."""

    path: str
    """Checkpoint."""
    format: str
    """Format that read it."""
    family: Family | None = None
    """The family, bound to the model; None if none fits but the checkpoint records its layout, so none is needed."""
    reasons: tuple[str, ...] = ()
    """Why this family was chosen."""
    parameters: tuple[ExplainedParameter, ...]
    """Every parameter, in the order of the checkpoint."""
    unused: tuple[Rule, ...] = ()
    """Rules that hold for the model but cover no name of the checkpoint."""
    recorded_in: Mapping[str, str] = field(default_factory=dict)
    """Without a family: mesh axis to where the checkpoint records how tensors are split over it."""

    @property
    def ok(self) -> bool:
        """Whether every parameter has exactly one rule and fits it."""
        return not any(parameter.problem for parameter in self.parameters)


def explain(path: Path, options: SourceOptions | None = None) -> FamilyReport:
    """What a family says about the checkpoint at `path`: the family in `options`, or one chosen by evidence.

    Raises SourceError, UsageError, and UnknownFamilyError if a family is needed and none or several fit.
    """
    fmt, _ = recognise(path)
    try:
        index = fmt.read(path)
    except UnknownFamilyError:
        if options in (None, SourceOptions()):
            raise
        index = fmt.configured(options).read(path)
    return explain_index(index, options)


def explain_index(index: Index, options: SourceOptions | None = None) -> FamilyReport:
    """What a family says about the parameters of `index`; see `explain`."""
    shapes, arguments = index.shapes, run_arguments(index)
    try:
        family, reasons = choose_family(names=shapes, shapes=shapes, arguments=arguments, options=options)
    except UnknownFamilyError:
        if not index.recorded_in:
            raise
        return FamilyReport(
            path=index.path,
            format=index.format,
            parameters=tuple(
                ExplainedParameter(
                    name=atom.name,
                    global_shape=atom.global_shape,
                    template=kind(f".{atom.name}").removeprefix("."),
                    patterns=tuple(f"{axis}: {pattern}" for axis, pattern in atom.patterns.items()),
                )
                for atom in index.atoms.values()
            ),
            recorded_in=index.recorded_in,
        )
    topology = index.topology
    axes = {"tp": topology.tp, "ep": topology.ep, "etp": topology.expert_tp}
    explained = tuple(
        _explain_parameter(atom, family, axes) for atom in index.atoms.values() if not family.ignores(atom.name)
    )
    used = {parameter.rule.name for parameter in explained if parameter.rule is not None}
    return FamilyReport(
        path=index.path,
        format=index.format,
        family=family,
        reasons=reasons,
        parameters=explained,
        unused=tuple(rule for rule in family.rules if rule.name not in used and family.holds(rule.when) is not False),
    )


def _explain_parameter(atom: AtomIndex, family: Family, axes: Mapping[str, int]) -> ExplainedParameter:
    named: ParsedName | None = None
    rule: Rule | None = None
    patterns: tuple[str, ...] = ()
    try:
        named = family.read(atom.name)
        problem = "" if named else NO_RULE
        if named is not None:
            rule = named.rule
            if not named.stacked:
                (match,) = family.match([named.canonical]).values()
                rule = match.rule
                shapes = named.global_shapes(atom.global_shape)
                layouts = [match.layout(axes=axes, global_shape=shape) for shape in shapes]
                patterns = tuple(f"{axis.axis}: {axis.pattern.name}" for layout in layouts for axis in layout.axes)
    except FamilyError as error:
        problem = str(error)
    template = "" if named is None else named.alias.names[named.part] if named.alias else named.rule.name.text
    return ExplainedParameter(
        name=atom.name,
        global_shape=atom.global_shape,
        canonical=named.canonical if named else "",
        style=named.style if named else "",
        template=template,
        part=named.part if named and named.alias and len(named.alias.names) > 1 else None,
        rule=rule,
        patterns=patterns or (tuple(map(str, rule.axes)) if rule else ()),
        problem=problem,
        order=named.alias.order if named and named.alias else (),
    )
