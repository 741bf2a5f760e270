"""An FSDP1 optimizer that was saved by its own `state_dict`, as verl does: it numbers flat parameters.

Each rank saves its shard of every flat state. The model beside the optimizer has every parameter in its own shape;
which parameters a flat one holds follows from its length (`lengths.units_of`). With `use_orig_params`, a number is one
parameter, and each rank saves a range of its elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ucp.core.layout import Overlap
from ucp.core.tensor import TensorRef
from ucp_formats.torch.files.entries import RankValues, SavedEntries
from ucp_formats.torch.files.flat.lengths import FlatShards, Shapes, join_parts, split_flat, units_of
from ucp_formats.torch.files.global_tensor import GlobalTensor
from ucp_formats.torch.state_dict.entries import StateEntry
from ucp_formats.torch.state_dict.model_dict import Path
from ucp_formats.torch.state_dict.numbered import Order, UnnamedError, name_params, order_params


def states_by_name(saved: SavedEntries, order: Order | None = None) -> tuple[StateEntry, ...]:
    """Entries of the optimizer under names instead of numbers, with states in the shapes of parameters.

    An optimizer without flat states is returned unchanged. `order`: the user's names for the numbers. Raises
    UnnamedError if lengths do not show which parameters a flat one holds, UsageError for an order that does not fit.
    """
    if not any(isinstance(entry.value, dict) and entry.path[-3:-2] == ("state",) for entry in saved.optimizer):
        return saved.optimizer
    optimizer = _FlatOptimizer.parse(saved)
    shapes = _shapes_of(saved.model)
    names = _names_of(optimizer, shapes, order)
    entries = [state for number, params in names.items() for state in _states_of(optimizer, number, params, shapes)]
    for entry in optimizer.settings:
        value = entry.value
        if entry.path[-1] == "params" and isinstance(value, list):
            value = [name for number in value for name in names[number]]
        entries.append(StateEntry(entry.path, None, value))
    return tuple(entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatOptimizer:
    """What ranks saved of the optimizer."""

    root: Path
    """Path of its states."""
    shards: Mapping[object, Mapping[str, FlatShards]]
    """Number to its flat states."""
    scalars: Mapping[object, Mapping[str, GlobalTensor]]
    """Number to its states without dims."""
    groups: Sequence[Sequence[int]]
    """Numbers of each group."""
    settings: Sequence[StateEntry]
    """Settings of groups."""
    ranks: int
    """Ranks that share one copy of a flat parameter."""

    @classmethod
    def parse(cls, saved: SavedEntries) -> _FlatOptimizer:
        ranks = max(map(_sharding_degree, saved.model))
        shards: dict[object, dict[str, FlatShards]] = {}
        scalars: dict[object, dict[str, GlobalTensor]] = {}
        settings, groups = [], []
        root: Path = ()
        for entry in saved.optimizer:
            match entry.path, entry.value:
                case (*above, "state", number, str(key)), dict(values):
                    shards.setdefault(number, {})[key] = _by_copy(values, ranks)
                    root = (*above, "state")
                case (*_, "state", number, str(key)), GlobalTensor() as scalar:
                    scalars.setdefault(number, {})[key] = scalar
                case path, value:
                    settings.append(entry)
                    if path[-1] == "params" and isinstance(value, list):
                        groups.append(value)
        return cls(root=root, shards=shards, scalars=scalars, groups=groups, settings=settings, ranks=ranks)


def _sharding_degree(entry: StateEntry) -> int:
    """Ranks that a parameter is sharded over."""
    axes = GlobalTensor.of(entry).layout.all_axes
    return prod(axis.parts for axis in axes if axis.pattern.overlap is Overlap.EXCLUSIVE)


def _by_copy(values: RankValues, ranks: int) -> FlatShards:
    """Shards by copy and rank: the ranks of one copy have consecutive numbers (`init_device_mesh`, HYBRID_SHARD)."""
    copies: dict[int, list[TensorRef | None]] = {}
    for rank, ref in values.items():
        shards = copies.setdefault(rank // ranks, [None] * ranks)
        shards[rank % ranks] = ref if isinstance(ref, TensorRef) and ref.numel else None
    return [copies[copy] for copy in sorted(copies)]


def _shapes_of(model: Sequence[StateEntry]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, each under the first of its names."""
    firsts = {entry.content if entry.shape and prod(entry.shape) else entry.path: entry for entry in reversed(model)}
    chosen = {id(entry) for entry in firsts.values()}
    return {
        str(entry.path[-1]): entry.shape
        for entry in model
        if entry.shape is not None and id(entry) in chosen and GlobalTensor.of(entry).is_shared
    }


def _numel(shards: FlatShards) -> int:
    return sum(ref.numel for ref in shards[0] if ref is not None)


def _names_of(optimizer: _FlatOptimizer, shapes: Shapes, order: Order | None) -> dict[int, list[str]]:
    """Number to the names of the parameters in it."""
    groups, shards = optimizer.groups, optimizer.shards
    numbers = [number for group in groups for number in group]
    lengths = {number: _numel(next(iter(shards[number].values()))) for number in numbers if number in shards}
    numels = {name: prod(shape) for name, shape in shapes.items()}
    forms = {str(number): length for number, length in lengths.items()}
    if order is not None or (len(numbers) == len(shapes) and set(lengths.values()) <= set(numels.values())):
        if order is None:
            naming = name_params(groups, forms, numels, shapes=shapes)
        else:
            flat_shapes = {number: (length,) for number, length in forms.items()}
            naming = order_params(groups, forms, numels, order, shapes={**shapes, **flat_shapes})
        return {number: [naming.names[number]] for number in numbers}
    units = units_of(shapes, list(lengths.values()), optimizer.ranks) if len(lengths) == len(numbers) else None
    if units is None or len(groups) > 1:
        raise UnnamedError(
            f"its {len(numbers)} flat parameters of FSDP1 have {list(lengths.values())} elements, which does not "
            f"show which of the {len(shapes)} parameters each of them holds",
            remedy="A run that saves what FSDP.optim_state_dict returns saves names",
        )
    return dict(zip(numbers, units, strict=True))


def _states_of(optimizer: _FlatOptimizer, number: int, names: Sequence[str], shapes: Shapes) -> Iterator[StateEntry]:
    """States of the parameters in one flat parameter."""
    unit = {name: shapes[name] for name in names}
    for key, shards in optimizer.shards.get(number, {}).items():
        if len(names) == 1 and _numel(shards) == prod(unit[names[0]]):
            states = {names[0]: join_parts(unit[names[0]], shards, names[0])}
        else:
            where = f"{key} of the flat parameter {number}"
            states = split_flat(unit, shards, numel=_numel(shards), where=where, is_padded=True)
        for name, state in states.items():
            yield StateEntry((*optimizer.root, name, key), state.shape, state, state.form)
    for key, scalar in optimizer.scalars.get(number, {}).items():
        for name in names:
            yield StateEntry((*optimizer.root, name, key), scalar.shape, scalar, scalar.form)
