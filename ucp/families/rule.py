"""Rules of a model family: how the parameters of one name template lie over the mesh, and what others call them.

A rule is data. Patterns are named, and made when the sizes of a model are known; block lengths are expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ucp.core.layout import Pattern
from ucp.core.region import Box
from ucp.core.tensor import contiguous_strides
from ucp.families.expression import Expression
from ucp.families.recipes import TensorRecipe, permute_view
from ucp.families.template import Template

PatternFactory = Callable[..., Pattern]
"""Makes a pattern from its options: a class such as `ucp_patterns.shard.Shard`."""

OptionValue = int | Expression | tuple[int | Expression, ...]
"""An option of a pattern as it stands in a rule."""

DIM = "dim"
"""The option that says which dim is cut; in expressions, its length before this axis cuts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRule:
    """How the tensor lies along one axis."""

    axis: str
    """Mesh axis, e.g. "tp"."""
    pattern: str
    """Registered name of the pattern, e.g. "shard"."""
    factory: PatternFactory = field(repr=False, compare=False)
    """Makes it."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Its options, by name."""

    @property
    def needs_length(self) -> bool:
        """Whether an option depends on the length of the dim that is cut."""
        return any(DIM in expression.names for expression in self.expressions)

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """Expressions among the options."""
        values = (v for own in self.options.values() for v in (own if isinstance(own, tuple) else (own,)))
        return tuple(value for value in values if isinstance(value, Expression))

    @property
    def dim(self) -> int:
        """Dim that the pattern cuts; 0 for one that cuts none."""
        dim = self.options.get(DIM, 0)
        return dim if isinstance(dim, int) else 0

    def make_pattern(self, values: Mapping[str, object]) -> Pattern:
        """The pattern, with `values` for the names in its options. Raises ExpressionError, ValueError."""
        return self.factory(**{name: _evaluate(option, values) for name, option in self.options.items()})

    def __str__(self) -> str:
        shown = ((k, f"[{', '.join(map(str, v))}]" if isinstance(v, tuple) else v) for k, v in self.options.items())
        options = ", ".join(f"{name}={option}" for name, option in shown)
        return f"{self.axis}: {self.pattern}({options})" if options else f"{self.axis}: {self.pattern}"


def _evaluate(option: OptionValue, values: Mapping[str, object]) -> int | tuple[int, ...]:
    if isinstance(option, tuple):
        return tuple(one.value(values) if isinstance(one, Expression) else one for one in option)
    return option.value(values) if isinstance(option, Expression) else option


class JoinedBox(NamedTuple):
    """Elements of a stored tensor in the one that it joins to with others."""

    tensor: int
    """Number of the stored tensor, in the order of `Alias.names`."""
    global_box: Box
    """Where they are in the joined one."""
    local: Box
    """Where they are in the stored one."""


class Elements(NamedTuple):
    """A stored tensor, looked at in another shape."""

    shape: tuple[int, ...]
    """Elements per dim."""
    strides: tuple[int, ...]
    """Elements to step in the stored tensor (row-major, complete), per dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """How another naming style stores what a rule names: as one tensor, or as several that join to it.

    A field of the rule's template that the names lack counts a leading dim of the stored tensor, in the order of the
    fields: `decoder.layers.mlp.linear_fc1.weight` of shape [layers, out, in].
    """

    names: tuple[str, ...]
    """Name templates of the stored tensors, in the order in which they join."""
    dim: int = 0
    """Dim along which they join."""
    groups: Expression | None = None
    """They join in so many turns, a part of each in every turn (attention by query groups); None for one turn."""
    blocks: tuple[OptionValue, ...] = ()
    """Lengths along `dim` of the parts that one stored tensor consists of, where they join in turns."""
    view: tuple[OptionValue, ...] = ()
    """Shape that the stored elements have in truth, row-major, where it is not the tensor's; -1 for what is left."""
    order: tuple[int, ...] = ()
    """Dims of the stored tensor (or view) in the order of stacked fields and rule; empty when they agree."""
    views: tuple[tuple[OptionValue, ...], ...] = ()
    """`view` of each tensor, where they differ."""
    orders: tuple[tuple[int, ...], ...] = ()
    """`order` of each tensor, where they differ."""
    lengths: tuple[OptionValue, ...] = ()
    """Length along `dim` of each tensor in the one that they join to, where they are not equal."""
    when: Expression | None = None
    """Condition on the model for writing it so; it is read in any case. None for always."""
    alongside: tuple[str, ...] = ()
    """Templates of parameters; where several rules have one name, it is that of the rule beside which the model has one
    of these, with the same numbers."""

    def elements(self, shape: tuple[int, ...], values: Mapping[str, object]) -> Elements:
        """The stored tensor of that shape as the rule sees it: stacked dims first. Raises ValueError.

        >>> Alias(names=("w",), view=(2, 3, -1), order=(0, 2, 1)).elements((3, 8), {})
        Elements(shape=(2, 4, 3), strides=(12, 1, 4))
        """
        lengths = [_evaluate(own, values) for own in self.view] or list(shape)
        known = [own for own in lengths if isinstance(own, int) and own >= 0]
        if len(known) < len(lengths):
            left = prod(shape) // max(prod(known), 1)
            lengths = [own if isinstance(own, int) and own >= 0 else left for own in lengths]
        seen = tuple(own for own in lengths if isinstance(own, int))
        if prod(seen) != prod(shape):
            raise ValueError(f"{self.names[0]} of shape {list(shape)} is not {list(seen)} looked at otherwise")
        strides = contiguous_strides(seen)
        order = self.order or tuple(range(len(seen)))
        if len(order) != len(seen):
            raise ValueError(f"{self.names[0]} of shape {list(shape)} has no {len(order)} dims to put in order")
        return Elements(tuple(seen[dim] for dim in order), tuple(strides[dim] for dim in order))

    @property
    def is_plain(self) -> bool:
        """Whether it is one tensor whose elements go as the rule's."""
        apart = self.blocks or self.view or self.order or self.views or self.orders or self.groups is not None
        return len(self.names) == 1 and not apart

    def unpack(self, part: int, shape: tuple[int, ...], stacked: int, values: Mapping[str, object]) -> TensorRecipe:
        """Stored tensor number `part`, of that shape, as the rule sees it: stacked dims first. Raises ValueError."""
        view = self._sizes(self._view(part), prod(shape), values) or shape
        order = self._order(part) or tuple(range(len(view)))
        if len(order) != len(view):
            raise ValueError(f"{self.names[part]} of shape {list(shape)} has no {len(order)} dims to put in order")
        return permute_view(str(part), shape, view, order, min(len(view), len(shape) + stacked))

    def pack(self, part: int, seen: tuple[int, ...], stacked: int, values: Mapping[str, object]) -> TensorRecipe:
        """The way back: tensor number `part` as it is stored, of the one that the rule sees. Raises ValueError."""
        view = self._sizes(self._view(part), prod(seen), values)
        if view and stacked:
            raise ValueError(f"{self.names[part]} holds several tensors in another shape, which is only read")
        order = self._order(part) or tuple(range(len(view or seen)))
        back = tuple(order.index(dim) for dim in range(len(order)))
        ordered = [view[dim] for dim in order] if view else seen
        return permute_view(str(part), seen, ordered, back, min(len(ordered), len(seen)))

    def part_shapes(self, shape: tuple[int, ...], values: Mapping[str, object]) -> list[tuple[int, ...]]:
        """Shapes of the tensors that join to one of `shape`, as the rule sees them. Raises ValueError."""
        if len(self.names) == 1:
            return [shape]
        if self.dim >= len(shape):
            raise ValueError(f"{', '.join(self.names)} cannot join along dim {self.dim} to {list(shape)}")
        each, rest = divmod(shape[self.dim], len(self.names))
        lengths = self._sizes(self.lengths, shape[self.dim], values) or (each,) * len(self.names)
        if sum(lengths) != shape[self.dim] or (rest and not self.lengths):
            raise ValueError(f"{', '.join(self.names)} are not {shape[self.dim]} long together")
        return [(*shape[: self.dim], length, *shape[self.dim + 1 :]) for length in lengths]

    def check_lengths(self, shapes: Sequence[tuple[int, ...]], values: Mapping[str, object]) -> None:
        """Prove that tensors of these shapes are as long as the sizes of the model say. Raises ValueError.

        Where a factor of all lengths is not known (`head_dim`), their proportions are compared.
        """
        named = [set(own.names) if isinstance(own, Expression) else set() for own in self.lengths]
        factors = set.intersection(*named) - values.keys()
        known = [at for at, names in enumerate(named) if names - factors <= values.keys()]
        wanted = self._sizes([self.lengths[at] for at in known], 0, {**dict.fromkeys(factors, 1), **values})
        found = [shapes[at][self.dim] for at in known]
        in_proportion = all(a * wanted[0] == b * found[0] for a, b in zip(found, wanted, strict=True))
        if not in_proportion or (not factors and [*wanted] != found):
            sizes = ", ".join(f"{name}={values[name]}" for name in sorted(set.union(*named) & values.keys()))
            raise ValueError(
                f"they are {', '.join(map(str, found))} long, not {', '.join(str(self.lengths[at]) for at in known)} "
                f"with {sizes}"
            )

    def _view(self, part: int) -> tuple[OptionValue, ...]:
        return self.views[part] if self.views else self.view

    def _order(self, part: int) -> tuple[int, ...]:
        return self.orders[part] if self.orders else self.order

    def _sizes(self, given: Sequence[OptionValue], numel: int, values: Mapping[str, object]) -> tuple[int, ...]:
        """Values of expressions; -1 is what is left of `numel`."""
        known = [_evaluate(own, values) for own in given]
        left = numel // max(prod(own for own in known if isinstance(own, int) and own >= 0), 1)
        return tuple(own if isinstance(own, int) and own >= 0 else left for own in known)

    def locate_parts(self, shapes: Sequence[tuple[int, ...]], values: Mapping[str, object]) -> tuple[JoinedBox, ...]:
        """Where the stored tensors lie in the joined one, in its order.

        `shapes`: of the stored tensors in elements, as the rule sees them, without stacked dims. Raises ValueError,
        ExpressionError.

        >>> boxes = Alias(names=("q", "k"), groups=Expression("2")).pieces([(4,), (2,)], {})
        >>> [(own.tensor, str(own.whole), str(own.local)) for own in boxes]
        [(0, '[0:2]', '[0:2]'), (1, '[2:3]', '[0:1]'), (0, '[3:5]', '[2:4]'), (1, '[5:6]', '[1:2]')]
        """
        turns = 1 if self.groups is None else self.groups.value(values)
        parts = self._parts(shapes, values)
        if turns < 1 or any(part.length % turns for part in parts):
            lengths = [part.length for part in parts]
            raise ValueError(f"{turns} groups do not divide the lengths {lengths} of {', '.join(self.names)}")
        boxes = []
        begin = 0
        for turn in range(turns):
            for part in parts:
                length = part.length // turns
                local = _slab(part.shape, self.dim, part.start + turn * length, length)
                boxes.append(JoinedBox(part.tensor, _slab(part.shape, self.dim, begin, length), local))
                begin += length
        return tuple(boxes)

    def _parts(self, shapes: Sequence[tuple[int, ...]], values: Mapping[str, object]) -> list[_JoinedPart]:
        """What joins, in order: the tensors, or the blocks of the only one."""
        if len(shapes) != len(self.names):
            raise ValueError(f"expected the shapes of {', '.join(self.names)}; got {len(shapes)}")
        if any(self.dim >= len(shape) for shape in shapes):
            raise ValueError(f"{', '.join(self.names)} of {len(shapes[0])} dims cannot join along dim {self.dim}")
        if not self.blocks:
            return [_JoinedPart(number, shape, 0, shape[self.dim]) for number, shape in enumerate(shapes)]
        parts = []
        start = 0
        for block in self.blocks:
            length = _evaluate(block, values)
            if isinstance(length, int):
                parts.append(_JoinedPart(0, shapes[0], start, length))
                start += length
        if start != shapes[0][self.dim]:
            raise ValueError(f"blocks {list(map(str, self.blocks))} are {start} long, not {shapes[0][self.dim]}")
        return parts


class _JoinedPart(NamedTuple):
    tensor: int
    shape: tuple[int, ...]
    start: int
    length: int


def _slab(shape: tuple[int, ...], dim: int, start: int, length: int) -> Box:
    offsets = tuple(start if own == dim else 0 for own in range(len(shape)))
    return Box(offsets, (*shape[:dim], length, *shape[dim + 1 :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is known of the parameters that one template names."""

    name: Template
    """Canonical name."""
    axes: tuple[AxisRule, ...]
    """How they lie over the mesh, outermost axis first; an axis that is not named has nothing to do with them."""
    when: Expression | None = None
    """Condition on the model (sizes and flags); None for always."""
    meaning: str = ""
    """What they are, for people."""
    buffer: bool = False
    """Not trained: no optimizer state."""
    shape: tuple[OptionValue, ...] = ()
    """Length of every dim of the global tensor; -1 for one that sizes do not tell, empty where none is stated."""
    padded: int | None = None
    """Dim that is padded to a multiple that depends on the layout; None for none."""
    aliases: Mapping[str, tuple[Alias, ...]] = field(default_factory=dict)
    """Naming style to the ways it stores them; the first is the one written."""
    source: str = ""
    """Family that it stands in."""

    def __str__(self) -> str:
        when = f" when {self.when}" if self.when else ""
        return f"{self.name}{when}"
