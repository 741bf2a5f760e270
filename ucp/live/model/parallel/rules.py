"""How a model family cuts a tensor over the ranks of a run: every layout that its rule allows, and its padded dim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ucp.contract.plugins import pattern
from ucp.core.layout import AxisLayout, Layout, Pattern
from ucp.errors import FamilyError
from ucp.families.expression import Expression, ExpressionError
from ucp.families.family import Family
from ucp.families.naming import ParsedName
from ucp.families.rule import DIM, Alias, AxisRule


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleLayouts:
    """What the rule of a tensor says."""

    layouts: tuple[Layout, ...]
    """Layouts that it allows, the likeliest first; none if the rule does not apply to this form of the tensor."""
    padded: int | None = None
    """Dim that a run may pad beyond the vocabulary, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRules:
    """The rules of a family, for the degrees of a run."""

    family: Family
    """The family, with the sizes of the model."""
    degrees: Mapping[str, int]
    """Ranks along `tp`, `ep`, `etp` and `dp`."""

    def find_layouts(self, name: str, shape: tuple[int, ...], local_shape: tuple[int, ...]) -> RuleLayouts | None:
        """What the family says about a tensor of the checkpoint; None without a rule for it. Raises FamilyError."""
        named = self.family.read(name)
        if named is None:
            return None
        alias = named.alias
        if alias is not None and (alias.view or (alias.order and named.stacked)):
            return RuleLayouts(layouts=())
        first = named.rule.name.filled({**dict.fromkeys(named.stacked, 0), **named.fields})
        rule = self.family.match([first])[first].rule
        layouts: list[tuple[AxisLayout, ...]] = [()]
        if "expert" in named.stacked and (parts := self.degrees.get("ep", 1)) > 1:  # one tensor of all experts
            layouts = [(AxisLayout("ep", parts, pattern("shard", dim=named.stacked.index("expert"))),)]
        for axis_rule in rule.axes:
            parts = self.degrees.get(axis_rule.axis, 1)
            if parts > 1:
                try:
                    patterns = tuple(self._find_patterns(axis_rule, named, shape, local_shape))
                except (ExpressionError, ValueError) as error:
                    raise FamilyError(f"{name}, shape {list(shape)}: {error}, by its rule {rule}") from error
                layouts = [(*outer, AxisLayout(axis_rule.axis, parts, cut)) for outer in layouts for cut in patterns]
        padded = None if rule.padded is None else _find_stored_dim(named, rule.padded)
        return RuleLayouts(layouts=tuple(map(Layout, layouts)), padded=padded)

    def _find_patterns(
        self, rule: AxisRule, named: ParsedName, shape: tuple[int, ...], local_shape: tuple[int, ...]
    ) -> Iterator[Pattern]:
        values, parts = {**self.degrees, **self.family.values}, self.degrees[rule.axis]
        if DIM not in rule.options:
            yield rule.make_pattern(values)
            return
        dim, alias = _find_stored_dim(named, rule.dim), named.alias
        if alias is not None and alias.blocks:
            yield self._cut_blocks(alias, dim, parts)
            return
        is_joined = alias is not None and len(alias.names) > 1
        if len(rule.options) > 1 and not is_joined:
            yield replace(rule, options={**rule.options, DIM: dim}).make_pattern({**values, DIM: shape[dim]})
            return
        is_grouped = alias is not None and alias.groups is not None
        yield from cut_patterns(dim, parts, shape, local_shape, is_grouped=is_grouped)

    def _cut_blocks(self, alias: Alias, dim: int, parts: int) -> Pattern:
        """Queries, keys and values in one dim: if ranks outnumber heads, neighbouring ranks hold the same head."""
        values = {**self.degrees, **self.family.values}
        blocks = [block.value(values) if isinstance(block, Expression) else block for block in alias.blocks]
        lengths = tuple(block for block in blocks if isinstance(block, int))
        groups = 0 if alias.groups is None else alias.groups.value(values)
        copies = parts // groups if groups and groups < parts and parts % groups == 0 else 1
        copies_of = tuple(copies if length < max(lengths) else 1 for length in lengths)
        return pattern("shard", dim=dim, blocks=lengths, copies=copies_of if copies > 1 else ())


def cut_patterns(
    dim: int, parts: int, shape: tuple[int, ...], local_shape: tuple[int, ...], *, is_grouped: bool = False
) -> Iterator[Pattern]:
    """The patterns that may cut one dim into `parts`, several if that is not evenly divisible.

    `is_grouped`: whether the dim consists of heads: if ranks outnumber them, as many neighbouring ranks hold the same
    head as the shapes tell.
    """
    yield pattern("shard", dim=dim)
    if shape[dim] % parts:
        yield pattern("chunk", dim=dim)
    copies, rest = divmod(local_shape[dim] * parts, max(shape[dim], 1))
    if is_grouped and not rest and copies > 1 and parts % copies == 0:
        yield pattern("shard", dim=dim, blocks=(shape[dim],), copies=(copies,))


def _find_stored_dim(named: ParsedName, dim: int) -> int:
    order = () if named.alias is None else named.alias.order
    return order[dim] if order else dim + len(named.stacked)
