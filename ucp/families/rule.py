"""Rules of a model family: layout over the mesh of the parameters with one name template, and their other names.

A rule is data: patterns are made once the sizes of a model are known, and block lengths are expressions.
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
"""An option of a pattern as a rule states it."""

DIM = "dim"
"""Option with the dim to shard; in expressions, the length of that dim before this axis shards it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRule:
    """Layout of a tensor along one axis."""

    axis: str
    """Mesh axis, e.g. "tp"."""
    pattern: str
    """Registered name of the pattern, e.g. "shard"."""
    factory: PatternFactory = field(repr=False, compare=False)
    """Makes the pattern."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Its options, by name."""

    @property
    def needs_length(self) -> bool:
        """Whether an option depends on the length of the sharded dim."""
        return any(DIM in expression.names for expression in self.expressions)

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """Expressions among the options."""
        values = (v for option in self.options.values() for v in (option if isinstance(option, tuple) else (option,)))
        return tuple(value for value in values if isinstance(value, Expression))

    @property
    def dim(self) -> int:
        """Dim that the pattern shards; 0 if it shards none."""
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
        return tuple(item.value(values) if isinstance(item, Expression) else item for item in option)
    return option.value(values) if isinstance(option, Expression) else option


class JoinedBox(NamedTuple):
    """A box of a stored tensor, and where it lies in the joined tensor."""

    tensor: int
    """Number of the stored tensor, in the order of `Alias.names`."""
    global_box: Box
    """Box in the joined tensor."""
    local: Box
    """Box in the stored tensor."""


class Elements(NamedTuple):
    """A strided view of a stored tensor."""

    shape: tuple[int, ...]
    """Elements per dim."""
    strides: tuple[int, ...]
    """Elements to step in the stored tensor (row-major), per dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """How another naming style stores the tensor of a rule: as one tensor, or as several that join to it.

    A field of the rule's template that is missing in the names is a leading dim of the stored tensor, in the order of
    the fields: `decoder.layers.mlp.linear_fc1.weight` has the shape [layers, out, in].
    """

    names: tuple[str, ...]
    """Name templates of the stored tensors, in the order in which they join."""
    dim: int = 0
    """Dim along which they join."""
    groups: Expression | None = None
    """Number of groups in which they interleave, a part of each per group (query groups of attention); None for one."""
    blocks: tuple[OptionValue, ...] = ()
    """Lengths along `dim` of the parts of a single stored tensor that interleave."""
    view: tuple[OptionValue, ...] = ()
    """Shape in which the stored elements are viewed (row-major), if not the tensor's; -1 for the remaining length."""
    order: tuple[int, ...] = ()
    """Permutation of the stored dims (or of `view`) to stacked fields, then the rule's dims; empty for none."""
    views: tuple[tuple[OptionValue, ...], ...] = ()
    """`view` of each tensor, if they differ."""
    orders: tuple[tuple[int, ...], ...] = ()
    """`order` of each tensor, if they differ."""
    lengths: tuple[OptionValue, ...] = ()
    """Length along `dim` of each tensor in the joined one, if they differ."""
    when: Expression | None = None
    """Condition on the model for writing it; it is always read. None for always."""
    alongside: tuple[str, ...] = ()
    """Templates of parameters. A name that several rules have belongs to the rule with one of these in the model, with
    the same numbers."""

    def elements(self, shape: tuple[int, ...], values: Mapping[str, object]) -> Elements:
        """View of a stored tensor of this shape as the rule defines it, stacked dims first. Raises ValueError.

        >>> Alias(names=("w",), view=(2, 3, -1), order=(0, 2, 1)).elements((3, 8), {})
        Elements(shape=(2, 4, 3), strides=(12, 1, 4))
        """
        view = self._sizes(self.view, prod(shape), values) or shape
        if prod(view) != prod(shape):
            raise ValueError(f"{self.names[0]} of shape {list(shape)} cannot be viewed as {list(view)}")
        strides, order = contiguous_strides(view), self.order or tuple(range(len(view)))
        if len(order) != len(view):
            raise ValueError(f"order has {len(order)} dims; {self.names[0]} of shape {list(shape)} does not")
        return Elements(tuple(view[dim] for dim in order), tuple(strides[dim] for dim in order))

    @property
    def is_plain(self) -> bool:
        """Whether it is a single tensor with its elements in the order of the rule."""
        is_rearranged = self.blocks or self.view or self.order or self.views or self.orders or self.groups is not None
        return len(self.names) == 1 and not is_rearranged

    def unpack(self, part: int, shape: tuple[int, ...], stacked: int, values: Mapping[str, object]) -> TensorRecipe:
        """Recipe for stored tensor number `part` as the rule defines it, stacked dims first. Raises ValueError."""
        view = self._sizes(self._view(part), prod(shape), values) or shape
        order = self._order(part) or tuple(range(len(view)))
        if len(order) != len(view):
            raise ValueError(f"order has {len(order)} dims; {self.names[part]} of shape {list(shape)} does not")
        return permute_view(str(part), shape, view, order, min(len(view), len(shape) + stacked))

    def pack(self, part: int, seen: tuple[int, ...], stacked: int, values: Mapping[str, object]) -> TensorRecipe:
        """The inverse of `unpack`: recipe for tensor number `part` as it is stored. Raises ValueError."""
        view = self._sizes(self._view(part), prod(seen), values)
        if view and stacked:
            raise ValueError(f"{self.names[part]} stacks tensors in a view, which can be read but not written")
        order = self._order(part) or tuple(range(len(view or seen)))
        back = tuple(order.index(dim) for dim in range(len(order)))
        ordered = [view[dim] for dim in order] if view else seen
        return permute_view(str(part), seen, ordered, back, min(len(ordered), len(seen)))

    def part_shapes(self, shape: tuple[int, ...], values: Mapping[str, object]) -> list[tuple[int, ...]]:
        """Shapes of the unpacked tensors that join to a tensor of `shape`. Raises ValueError."""
        if len(self.names) == 1:
            return [shape]
        if self.dim >= len(shape):
            raise ValueError(f"{', '.join(self.names)} cannot join along dim {self.dim} to {list(shape)}")
        length_of_each, rest = divmod(shape[self.dim], len(self.names))
        lengths = self._sizes(self.lengths, shape[self.dim], values) or (length_of_each,) * len(self.names)
        if sum(lengths) != shape[self.dim] or (rest and not self.lengths):
            raise ValueError(f"the lengths of {', '.join(self.names)} do not add up to {shape[self.dim]}")
        return [(*shape[: self.dim], length, *shape[self.dim + 1 :]) for length in lengths]

    def check_lengths(self, shapes: Sequence[tuple[int, ...]], values: Mapping[str, object]) -> None:
        """Prove that these shapes have the lengths that the sizes of the model give. Raises ValueError.

        If a factor of all lengths is unknown (`head_dim`), only their proportions are compared.
        """
        names_of_lengths = [set(length.names) if isinstance(length, Expression) else set() for length in self.lengths]
        factors = set.intersection(*names_of_lengths) - values.keys()
        known = [part for part, names in enumerate(names_of_lengths) if names - factors <= values.keys()]
        expected = self._sizes([self.lengths[part] for part in known], 0, {**dict.fromkeys(factors, 1), **values})
        actual = [shapes[part][self.dim] for part in known]
        in_proportion = all(a * expected[0] == b * actual[0] for a, b in zip(actual, expected, strict=True))
        if not in_proportion or (not factors and [*expected] != actual):
            sizes = ", ".join(f"{name}={values[name]}" for name in sorted(set.union(*names_of_lengths) & values.keys()))
            formulas = ", ".join(str(self.lengths[part]) for part in known)
            raise ValueError(f"their lengths are {', '.join(map(str, actual))}; expected {formulas}, with {sizes}")

    def _view(self, part: int) -> tuple[OptionValue, ...]:
        return self.views[part] if self.views else self.view

    def _order(self, part: int) -> tuple[int, ...]:
        return self.orders[part] if self.orders else self.order

    def _sizes(self, options: Sequence[OptionValue], numel: int, values: Mapping[str, object]) -> tuple[int, ...]:
        """Values of options; -1 becomes the remaining factor of `numel`."""
        known = [_evaluate(value, values) for value in options]
        remainder = numel // max(prod(value for value in known if isinstance(value, int) and value >= 0), 1)
        return tuple(value if isinstance(value, int) and value >= 0 else remainder for value in known)

    def locate_parts(self, shapes: Sequence[tuple[int, ...]], values: Mapping[str, object]) -> tuple[JoinedBox, ...]:
        """Boxes of the stored tensors in the joined one, in its order.

        `shapes`: of the unpacked tensors, without stacked dims. Raises ValueError, ExpressionError.

        >>> boxes = Alias(names=("q", "k"), groups=Expression("2")).locate_parts([(4,), (2,)], {})
        >>> [(own.tensor, str(own.global_box), str(own.local)) for own in boxes]
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
        """The parts that are joined, in order: the tensors, or the blocks of a single tensor."""
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
    offsets = tuple(start if other_dim == dim else 0 for other_dim in range(len(shape)))
    return Box(offsets, (*shape[:dim], length, *shape[dim + 1 :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is known of the parameters that one template names."""

    name: Template
    """Canonical name."""
    axes: tuple[AxisRule, ...]
    """Layout over the mesh, outermost axis first; other axes do not divide the tensor."""
    when: Expression | None = None
    """Condition on the model (sizes and flags); None for always."""
    meaning: str = ""
    """What they are, for people."""
    buffer: bool = False
    """Not trained: no optimizer state."""
    shape: tuple[OptionValue, ...] = ()
    """Length of every dim of the global tensor; -1 for an unknown length, empty if no shape is stated."""
    padded: int | None = None
    """Dim whose padding depends on the layout, if there is one."""
    aliases: Mapping[str, tuple[Alias, ...]] = field(default_factory=dict)
    """Naming style to its aliases; the first is the one written."""
    source: str = ""
    """Family that defines it."""

    def __str__(self) -> str:
        when = f" when {self.when}" if self.when else ""
        return f"{self.name}{when}"
