"""A name that matches a rule, and the layout that the rule gives it.

The patterns are made from the degrees of the mesh and either the global shape or the shapes of all parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from ucp.core.layout import AxisLayout, Layout, compute_local_shape, infer_global_shape
from ucp.errors import FamilyError
from ucp.families.expression import ExpressionError
from ucp.families.rule import DIM, AxisRule, Rule

if TYPE_CHECKING:
    from ucp.families.family import Family

_MOST_PIECES = 1 << 16
"""Most pieces of a tensor on one rank: the pieces along several axes multiply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A name and the rule that it matches."""

    name: str
    """Canonical name."""
    rules: tuple[Rule, ...]
    """The rule; several if an unknown size or flag decides between them."""
    fields: Mapping[str, int]
    """Field to number, e.g. {"layer": 7, "expert": 3}."""
    values: Mapping[str, int] = field(repr=False)
    """Known sizes and flags."""

    @property
    def rule(self) -> Rule:
        """The only rule. Raises FamilyError if unknown sizes decide between several layouts."""
        if any(rule.axes != self.rules[0].axes for rule in self.rules):
            wanted = sorted({name for rule in self.rules if rule.when for name in rule.when.names} - set(self.values))
            raise FamilyError(
                f"the layout of {self.name} depends on {', '.join(wanted)}, which neither the recorded arguments nor "
                f"the shapes tell; state it in a rules file: [given] {wanted[0] if wanted else 'NAME'} = N (--patterns)"
            )
        return self.rules[0]

    @property
    def template(self) -> str:
        """The template that matches the name."""
        return self.rules[0].name.text

    @property
    def buffer(self) -> bool:
        """Whether it is a buffer."""
        return self.rules[0].buffer

    def renamed(self, **fields: int) -> str:
        """The canonical name with other numbers, e.g. `match.renamed(layer=12)`."""
        return self.rules[0].name.filled({**self.fields, **fields})

    def axes(self, axes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of `axes` that the rule names, outermost first: the order of `local_shapes` in `layout`."""
        return tuple(rule.axis for rule in self.rule.axes if rule.axis in axes)

    def layout(
        self,
        *,
        axes: Mapping[str, int],
        local_shapes: Sequence[tuple[int, ...]] = (),
        global_shape: tuple[int, ...] | None = None,
    ) -> Layout:
        """Layout of the tensor over the axes that the rule names (see `axes`).

        `axes`: degree of every mesh axis. Pass either the global shape, or the shapes of all parts: one per rank of the
        rule's axes, the first axis slowest. Raises FamilyError if a size is unknown or the shapes do not fit the rule.
        """
        axis_rules = [axis for axis in self.rule.axes if axis.axis in axes]
        values: dict[str, object] = {**axes, **self.values}
        try:
            if global_shape is not None:
                return _from_whole(axis_rules, values, axes, global_shape)
            return _from_parts(axis_rules, values, axes, list(local_shapes))
        except (ExpressionError, ValueError) as error:
            raise FamilyError(self._misfit(error, global_shape, local_shapes)) from error

    def global_shape(self, layout: Layout, local_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Global shape under `layout`. Raises FamilyError if the parts do not fit together."""
        try:
            return infer_global_shape(layout, local_shapes)
        except ValueError as error:
            raise FamilyError(self._misfit(error, None, local_shapes)) from error

    def _misfit(
        self, error: Exception, global_shape: tuple[int, ...] | None, local_shapes: Sequence[tuple[int, ...]]
    ) -> str:
        shape = f"shape {list(global_shape)}" if global_shape else f"parts {[list(shape) for shape in local_shapes]}"
        rule = self.rule
        how = "; ".join(map(str, rule.axes))
        return (
            f"{self.name}, {shape}, does not fit its rule {rule} ({how}) of {rule.source}: {error}. "
            f"Check --family, or say what is missing in a rules file (--patterns)"
        )


def _from_whole(
    axis_rules: Sequence[AxisRule], values: Mapping[str, object], degrees: Mapping[str, int], shape: tuple[int, ...]
) -> Layout:
    """Patterns from the global shape, outermost first."""
    layouts = []
    global_shape = shape
    for axis in axis_rules:
        length = shape[axis.dim] if axis.dim < len(shape) else 0
        layouts.append(AxisLayout(axis.axis, degrees[axis.axis], axis.make_pattern({**values, DIM: length})))
        shape = compute_local_shape(Layout((layouts[-1],)), shape, {axis.axis: 0})
    return _bounded(Layout(tuple(layouts)), global_shape)


def _from_parts(
    axis_rules: Sequence[AxisRule],
    values: Mapping[str, object],
    degrees: Mapping[str, int],
    shapes: list[tuple[int, ...]],
) -> Layout:
    """Patterns from the shapes of all parts, innermost first."""
    ranks = prod(degrees[axis.axis] for axis in axis_rules)
    if len(shapes) != ranks:
        over = " x ".join(f"{axis.axis}={degrees[axis.axis]}" for axis in axis_rules) or "no axis"
        raise ValueError(f"expected the shapes of {ranks} parts ({over}); got {len(shapes)}")
    layouts: list[AxisLayout] = []
    for axis in reversed(axis_rules):
        parts = degrees[axis.axis]
        groups = [shapes[start : start + parts] for start in range(0, len(shapes), parts)]
        dims = [[shape[axis.dim] for shape in group if axis.dim < len(shape)] for group in groups]
        patterns = [axis.make_pattern({**values, DIM: sum(lengths) if axis.needs_length else 0}) for lengths in dims]
        if any(pattern != patterns[0] for pattern in patterns):
            raise ValueError(f"parts along {axis.axis} are laid out in different ways: {patterns}")
        layouts.insert(0, AxisLayout(axis.axis, parts, patterns[0]))
        shapes = [pattern.whole_shape(group) for pattern, group in zip(patterns, groups, strict=True)]
    return _bounded(Layout(tuple(layouts)), shapes[0])


def _bounded(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """`layout`. Raises ValueError if its axes cut a tensor of this shape into too many pieces."""
    pieces = 1
    for axis in layout.axes if len(layout.axes) > 1 else ():
        pieces *= len(axis.pattern.regions(shape, axis.parts, 0))
        shape = compute_local_shape(Layout((axis,)), shape, {axis.axis: 0})
        if pieces > _MOST_PIECES:
            raise ValueError(f"expected at most {_MOST_PIECES:,} pieces of a tensor on a rank; got {pieces:,}")
    return layout


def find_cut_dim(family: Family, name: str) -> int | None:
    """Dim of a stored tensor that tensor parallelism shards; None if it is replicated, a view, or has no rule."""
    named = family.read(name)
    if named is None or named.stacked or (named.alias is not None and named.alias.view):
        return None
    axes = family.match([named.canonical])[named.canonical].rule.axes
    dim = next((axis.dim for axis in axes if axis.axis == "tp" and DIM in axis.options), None)
    order = named.alias.order if named.alias is not None else ()
    return order[dim] if order and dim is not None else dim
