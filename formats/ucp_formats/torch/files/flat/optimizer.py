"""An optimizer of FSDP1 that was saved by its own `state_dict`: numbers of flat parameters, and flat parts of states.

verl saves it so. The model beside it has every parameter in its own shape; which of them a flat parameter holds
follows from its length (`lengths.units_of`). With `use_orig_params` a number is a parameter, and every rank has a
stretch of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ucp.core.layout import Overlap
from ucp.core.tensor import TensorRef
from ucp_formats.torch.files.flat.lengths import Shapes, join_parts, split_flat, units_of
from ucp_formats.torch.files.joined import Joined
from ucp_formats.torch.files.leaves import Ranked, Tree
from ucp_formats.torch.model_dict import Path
from ucp_formats.torch.numbered import Order, UnnamedError, name_params, order_params
from ucp_formats.torch.state_dict import Leaf

_Shards = Sequence[Sequence[TensorRef | None]]
"""Flat parts in the order of the ranks that cut it, for each copy."""


def states_by_name(tree: Tree, order: Order | None = None) -> tuple[Leaf, ...]:
    """Entries of the optimizer with names for numbers, and states in the shapes of parameters.

    Those of other optimizers as they are. `order`: names for the numbers, as the user gives them. Raises UnnamedError
    where lengths do not tell the parameters, UsageError for an order that does not fit.
    """
    if not any(isinstance(leaf.value, dict) and leaf.path[-3:-2] == ("state",) for leaf in tree.optimizer):
        return tree.optimizer
    saved = _Saved.of(tree)
    shapes = _shapes(tree.model)
    names = _names(saved, shapes, order)
    found = [own for number, own_names in names.items() for own in _states(saved, number, own_names, shapes)]
    for leaf in saved.others:
        is_params = leaf.path[-1] == "params" and isinstance(leaf.value, list)
        value = [name for number in leaf.value for name in names[number]] if is_params else leaf.value  # type: ignore[attr-defined]  # a list
        found.append(Leaf(leaf.path, None, value))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """What ranks saved of the optimizer."""

    root: Path
    """Path of its states"""
    flat: Mapping[object, Mapping[str, _Shards]]
    """Number to its states in flat parts"""
    counts: Mapping[object, Mapping[str, Joined]]
    """Number to its states without dims"""
    groups: Sequence[Sequence[int]]
    """Numbers of each group"""
    others: Sequence[Leaf]
    """Settings of groups"""
    ranks: int
    """Ranks that cut a flat parameter"""

    @classmethod
    def of(cls, tree: Tree) -> _Saved:
        ranks = max(_cuts(leaf) for leaf in tree.model)
        flat: dict[object, dict[str, _Shards]] = {}
        counts: dict[object, dict[str, Joined]] = {}
        others, groups = [], []
        root: Path = ()
        for leaf in tree.optimizer:
            match leaf.path, leaf.value:
                case (*above, "state", number, str(key)), dict(values):
                    flat.setdefault(number, {})[key] = _shards(values, ranks)
                    root = (*above, "state")
                case (*_, "state", number, str(key)), Joined() as joined:
                    counts.setdefault(number, {})[key] = joined
                case (*_, "params"), list(numbers):
                    groups.append(numbers)
                    others.append(leaf)
                case _:
                    others.append(leaf)
        return cls(root=root, flat=flat, counts=counts, groups=groups, others=others, ranks=ranks)


def _cuts(leaf: Leaf) -> int:
    """Ranks among which a parameter is cut."""
    layout = Joined.of(leaf).layout
    return prod(axis.parts for axis in (*layout.axes, *layout.flat) if axis.pattern.overlap is Overlap.EXCLUSIVE)


def _shards(values: Ranked, ranks: int) -> _Shards:
    """Parts by copy and place: ranks that cut one copy follow one another (`init_device_mesh`, HYBRID_SHARD)."""
    copies: dict[int, list[TensorRef | None]] = {}
    for rank, ref in values.items():
        own = copies.setdefault(rank // ranks, [None] * ranks)
        own[rank % ranks] = ref if isinstance(ref, TensorRef) and ref.numel else None
    return [copies[copy] for copy in sorted(copies)]


def _shapes(model: Sequence[Leaf]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, each under the first of its names."""
    firsts = {leaf.content if leaf.shape and prod(leaf.shape) else leaf.path: leaf for leaf in reversed(model)}
    chosen = {id(leaf) for leaf in firsts.values()}
    return {
        str(leaf.path[-1]): leaf.shape
        for leaf in model
        if leaf.shape is not None and id(leaf) in chosen and getattr(leaf.value, "is_shared", False)
    }


def _length(shards: _Shards) -> int:
    return sum(ref.numel for ref in shards[0] if ref is not None)


def _names(saved: _Saved, shapes: Shapes, order: Order | None) -> dict[int, list[str]]:
    """Number to the names of the parameters in it."""
    numbers = [number for group in saved.groups for number in group]
    lengths = {number: _length(next(iter(saved.flat[number].values()))) for number in numbers if number in saved.flat}
    counts = {name: prod(shape) for name, shape in shapes.items()}
    forms = {str(number): own for number, own in lengths.items()}
    if order is not None or (len(numbers) == len(shapes) and set(lengths.values()) <= set(counts.values())):
        sized: Shapes = {**shapes, **{number: (own,) for number, own in forms.items()}}
        named = (
            name_params(saved.groups, forms, counts, shapes=shapes)
            if order is None
            else order_params(saved.groups, forms, counts, order, shapes=sized)
        ).names
        return {number: [named[number]] for number in numbers}
    units = units_of(shapes, list(lengths.values()), saved.ranks) if len(lengths) == len(numbers) else None
    if units is None or len(saved.groups) > 1:
        raise UnnamedError(
            f"its {len(numbers)} flat parameters of FSDP1 have {list(lengths.values())} elements: lengths do not tell "
            f"which of {len(shapes)} parameters each holds",
            remedy="A run that saves FSDP.optim_state_dict saves names",
        )
    return dict(zip(numbers, units, strict=True))


def _states(saved: _Saved, number: int, names: Sequence[str], shapes: Shapes) -> Iterator[Leaf]:
    """States of the parameters in one flat parameter."""
    own = {name: shapes[name] for name in names}
    for key, shards in saved.flat.get(number, {}).items():
        if len(names) == 1 and _length(shards) == prod(own[names[0]]):
            joined = {names[0]: join_parts(own[names[0]], shards, names[0])}
        else:
            where = f"{key} of the flat parameter {number}"
            joined = split_flat(own, shards, numel=_length(shards), where=where, is_padded=True)
        for name, value in joined.items():
            yield Leaf((*saved.root, name, key), value.shape, value, value.form)
    for key, count in saved.counts.get(number, {}).items():
        for name in names:
            yield Leaf((*saved.root, name, key), count.shape, count, count.form)
