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
    """Ways in which it may be cut, the likeliest first; none where the rule does not say for this arrangement."""
    padded: int | None = None
    """Dim that a run may make longer than its vocabulary; None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRules:
    """A family, for the degrees of a run."""

    family: Family
    """Bound to the model."""
    degrees: Mapping[str, int]
    """Ranks along `tp`, `ep` and `etp`."""

    def of(self, name: str, shape: tuple[int, ...], local_shape: tuple[int, ...]) -> RuleLayouts | None:
        """What the family says of a tensor of the checkpoint; None where it has no rule for it."""
        named = self.family.read(name)
        if named is None:
            return None
        alias = named.alias
        if alias is not None and (alias.view or (alias.order and named.stacked)):
            return RuleLayouts(layouts=())
        first = named.rule.name.filled({**dict.fromkeys(named.stacked, 0), **named.fields})
        rule = self.family.match([first])[first].rule
        axes = [own for own in rule.axes if self.degrees.get(own.axis, 1) > 1]
        try:
            ways = [tuple(self._patterns(own, named, shape, local_shape)) for own in axes]
        except (ExpressionError, ValueError) as error:
            raise FamilyError(f"{name}, shape {list(shape)}: {error}, by its rule {rule}") from error
        layouts: list[tuple[AxisLayout, ...]] = [()]
        if "expert" in named.stacked and (parts := self.degrees.get("ep", 1)) > 1:  # experts that one tensor holds
            layouts = [(AxisLayout("ep", parts, pattern("shard", dim=named.stacked.index("expert"))),)]
        for own, patterns in zip(axes, ways, strict=True):
            parts = self.degrees[own.axis]
            layouts = [(*outer, AxisLayout(own.axis, parts, each)) for outer in layouts for each in patterns]
        padded = None if rule.padded is None else _stored_dim(named, rule.padded)
        return RuleLayouts(layouts=tuple(map(Layout, layouts)), padded=padded)

    def _patterns(
        self, own: AxisRule, named: ParsedName, shape: tuple[int, ...], local_shape: tuple[int, ...]
    ) -> Iterator[Pattern]:
        if DIM not in own.options:
            yield own.make_pattern({**self.degrees, **self.family.values})
            return
        dim, alias = _stored_dim(named, own.dim), named.alias
        if alias is not None and alias.blocks:
            yield self._blocks(alias, dim, self.degrees[own.axis])
            return
        made = replace(own, options={**own.options, DIM: dim})
        joined = alias is not None and len(alias.names) > 1
        options = {DIM: dim} if joined else own.options
        if len(options) > 1:
            yield made.make_pattern({**self.degrees, **self.family.values, DIM: shape[dim]})
            return
        shared = alias is not None and alias.groups is not None
        yield from cut_patterns(dim, self.degrees[own.axis], shape, local_shape, shared=shared)

    def _blocks(self, alias: Alias, dim: int, parts: int) -> Pattern:
        """Queries, keys and values one after another: heads that are fewer than ranks lie on neighbours."""
        values = {**self.degrees, **self.family.values}
        blocks = tuple(own.value(values) if isinstance(own, Expression) else own for own in alias.blocks)
        whole = [block for block in blocks if isinstance(block, int)]
        groups = 0 if alias.groups is None else alias.groups.value(values)
        few = parts // groups if groups and groups < parts and parts % groups == 0 else 1
        copies = tuple(few if block < max(whole) else 1 for block in whole)
        return pattern("shard", dim=dim, blocks=tuple(whole), copies=copies if few > 1 else ())


def cut_patterns(
    dim: int, parts: int, shape: tuple[int, ...], local_shape: tuple[int, ...], *, shared: bool = False
) -> Iterator[Pattern]:
    """One dim in as many parts, in the ways there are where it does not divide.

    `shared`: neighbours hold the same where there are fewer heads than ranks, as many as the shapes tell.
    """
    yield pattern("shard", dim=dim)
    if shape[dim] % parts:
        yield pattern("chunk", dim=dim)
    copies, rest = divmod(local_shape[dim] * parts, max(shape[dim], 1))
    if shared and not rest and copies > 1 and parts % copies == 0:
        yield pattern("shard", dim=dim, blocks=(shape[dim],), copies=(copies,))


def _stored_dim(named: ParsedName, dim: int) -> int:
    order = () if named.alias is None else named.alias.order
    return order[dim] if order else dim + len(named.stacked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """Marks on a parameter."""

    dim: int | None = None
    """Dim that tensor-parallel ranks cut, none below 0 but such as are none of its dims; None where it does not say."""
    blocks: int = 1
    """Blocks of that dim, each cut on its own (Megatron's stride: gate and up)."""
    is_expert: bool = False
    """Whether it is not reduced over all data-parallel ranks, as experts are not."""

    @classmethod
    def of(cls, param: object) -> Attributes:
        """The marks of a tensor; those that are not there mean what Megatron takes them for."""
        dim, dims = getattr(param, "partition_dim", None), getattr(param, "ndim", 0)
        is_cut = getattr(param, "tensor_model_parallel", False) is True and isinstance(dim, int)
        if isinstance(dim, int) and -dims <= dim < 0:
            dim += dims
        return cls(
            dim=dim if is_cut else None,
            blocks=max(int(getattr(param, "partition_stride", 1) or 1), 1),
            is_expert=getattr(param, "allreduce", True) is False,
        )
