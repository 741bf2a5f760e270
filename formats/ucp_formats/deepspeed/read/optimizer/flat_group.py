"""Reads the states of a flat group: parameters that the optimizer steps as one flat tensor, partitioned over ranks.

Every rank has a range of the flat master weights, and named states for it. A state is

- one number for all parameters (`step`): a Python number, or a tensor of one element, equal on every rank;
- one number per element: a tensor as long as the rank's share in a layout of the group;
- anything else, which cannot be assigned to parameters: kept as an extra, and reported (`Index.lost`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucp.contract.layouts import FlatLayout
from ucp.contract.ranks import Checksums, Problems, make_rank_extras
from ucp.core.index import STEP, WEIGHT, Extra, Fragment, LostStates, ParamGroup, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.core.union import (
    ShardedTensor,
    ShardSet,
    StateSource,
    StoredShard,
    merge_counts,
    state_from_number,
    state_from_scalar,
)
from ucp.errors import format_list
from ucp.io.pickle.fields import Shape, describe_value

_UNPLACED = "optimizer states that cannot be assigned to single parameters are kept as extras (optimizer_state/...)"


@dataclass(slots=True, kw_only=True)
class OptimizerPart:
    """Everything that was read from the optimizer."""

    states: dict[str, dict[str, StateSource]] = field(default_factory=dict)
    """Trained parameter to state name to state; `weight` is the master, where there is one."""
    groups: list[ParamGroup] = field(default_factory=list)
    """Parameter groups."""
    extras: list[Extra] = field(default_factory=list)
    """Values that are not states of parameters."""
    notes: list[str] = field(default_factory=list)
    """Notes to the user, mostly on assumptions."""
    dropped: list[str] = field(default_factory=list)
    """Left-out states, each with the reason."""
    lost: dict[str, LostStates] = field(default_factory=dict)
    """Parameters with states that cannot be assigned to single parameters."""

    def lose(self, params: Iterable[str], unplaced: Sequence[str]) -> None:
        """Record that states of `params` are only kept as extras; `unplaced`: a description of each state."""
        loss = LostStates(reason=f"{_UNPLACED}:\n{format_list(unplaced)}\nthey belong to")
        self.lost |= dict.fromkeys(params, loss)
        self.notes.append(
            f"{_UNPLACED}; a target that needs the optimizer states cannot be written:\n{format_list(unplaced)}"
        )

    def take_group_steps(self) -> None:
        """Copy the `step` of a group to its parameters if none of them has one (as in apex and early FusedAdam).

        If a parameter has a step, the group's is stale and stays a hyper-parameter.
        """
        for number, group in enumerate(self.groups):
            params = [states for name in group.params if (states := self.states.get(name, {})).keys() - {WEIGHT}]
            step = state_from_scalar(group.hyper.get(STEP))
            if step is None or not params or any(STEP in states for states in params):
                continue
            for states in params:
                states[STEP] = step
            self.notes.append(f"step of group {number} is taken from the parameter group: the states have none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The share of one rank in a flat group."""

    rank: int
    """The rank, counted among the ranks that the group is partitioned over."""
    file: str
    """Name of its file, for messages."""
    weight: TensorRef
    """The flat masters."""
    states: Mapping[str, object]
    """State name to value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroupStates:
    """Parameters that share one flat tensor."""

    label: str
    """Name for messages, for example "group 0"."""
    shapes: Mapping[str, Shape]
    """Parameter to shape, in the order of the flat tensor."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Parameter to its global name, where the two differ (experts)."""
    layouts: tuple[FlatLayout, ...]
    """Layouts that its tensors can have: the first one that fits all ranks is used, unless another fits differently."""
    state_layouts: tuple[FlatLayout, ...] = ()
    """Further layouts that states can have, but weights cannot."""
    shards: tuple[Shard, ...]
    """The share of each rank."""
    global_shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Parameter to its global shape, where each expert-parallel rank has a part; the parts are added one by one."""
    coords: Mapping[str, int] = field(default_factory=dict)
    """Coordinates of these ranks on axes other than dp."""
    axes: Mapping[str, tuple[AxisLayout, ...]] = field(default_factory=dict)
    """Parameter to how it is split over those axes, where it is."""


def add_flat_group(part: OptimizerPart, group: FlatGroupStates, checksums: Checksums, problems: Problems) -> None:
    """Add the states of every parameter of `group`; what cannot be read goes to `problems`."""
    reader = _GroupReader(part, group, checksums, problems)
    weights = {shard.rank: shard.weight for shard in group.shards}
    layout = reader.find_layout(group.layouts, weights)
    if layout is None:
        problems.unsupported.append(reader.describe_misfit(WEIGHT, weights))
    else:
        reader.add_elementwise(WEIGHT, weights, layout)
    for name in dict.fromkeys(name for shard in group.shards for name in shard.states):
        reader.add(name)
    if reader.unplaced:
        part.lose(reader.states, reader.unplaced)


class _GroupReader:
    """Reads the states of one group."""

    def __init__(self, part: OptimizerPart, group: FlatGroupStates, checksums: Checksums, problems: Problems) -> None:
        self.part = part
        self.group = group
        self.checksums = checksums
        self.problems = problems
        self.unplaced: list[str] = []
        self.states = {
            group.names.get(name, name): part.states.setdefault(group.names.get(name, name), {})
            for name in group.shapes
        }
        self.files = {shard.rank: shard.file for shard in group.shards}
        self.coords = {rank: {**group.coords, "dp": rank} for rank in self.files}
        self.shards_by_layout: dict[int, dict[str, tuple[Layout, list[tuple[int, int]]]]] = {}

    def add(self, name: str) -> None:
        """Add state `name`."""
        label, shards = self.group.label, self.group.shards
        values = {shard.rank: shard.states[name] for shard in shards if shard.states.get(name) is not None}
        tensors = {rank: value for rank, value in values.items() if isinstance(value, TensorRef)}
        numbers = {r: value for r, value in values.items() if r not in tensors and state_from_scalar(value) is not None}
        if not values:
            self.part.dropped.append(f"{label}: state {name} is None everywhere")
        elif len(tensors) == len(values):
            layout = self.find_layout(self.group.layouts + self.group.state_layouts, tensors)
            if layout is not None:
                self.add_elementwise(name, tensors, layout)
            elif len({ref.shape for ref in tensors.values()}) == 1 == next(iter(tensors.values())).numel:
                self.add_copies(name, tensors)
            else:
                self.keep(name, values, self.describe_misfit(name, tensors))
        elif len(numbers) == len(values):
            self.add_number(name, numbers)
        elif tensors or numbers:
            shown = {self.files[rank]: describe_value(value) for rank, value in values.items()}
            self.problems.check_agreement(f"the kind of {name} of {label}", shown)
        else:
            self.keep(name, values, f"{label}: state {name} is {describe_value(next(iter(values.values())))}")

    def keep(self, name: str, values: Mapping[int, object], what: str) -> None:
        """Keep a state as an extra; `what`: a description of it for the user."""
        self.part.extras += make_rank_extras(f"optimizer_state/{self.group.label}/{name}", values, self.checksums)
        self.unplaced.append(what)

    def add_elementwise(self, name: str, tensors: Mapping[int, TensorRef], layout: FlatLayout) -> None:
        """Add a state that has one number per element."""
        absent = [rank for rank in self.files if rank not in tensors and layout.spans(rank)]
        if not self._check_dtype(name, tensors) or not self._check_present(name, absent):
            return
        first = next(iter(tensors.values()))
        starts_by_param = self._find_starts(layout)
        for (param, shape), states in zip(self.group.shapes.items(), self.states.values(), strict=True):
            unsplit = Layout(self.group.axes.get(param, ()))
            if param not in starts_by_param:
                shards = ShardSet(unsplit, (StoredShard(self.group.coords, first),))
            elif layout.ranks == 1:
                ref = first.strided(starts_by_param[param][1][0][1], shape, contiguous_strides(shape))
                shards = ShardSet(unsplit, (StoredShard(self.group.coords, ref),))
            else:
                split, starts = starts_by_param[param]
                stored = [StoredShard(self.coords[rank], tensors[rank], start) for rank, start in starts]
                shards = ShardSet(split, tuple(stored))
            tensor = ShardedTensor(dtype=first.dtype, shape=shape, shard_sets=(shards,))
            if param in self.group.global_shapes:
                before = states.get(name)
                sets = before.shard_sets if isinstance(before, ShardedTensor) else ()
                tensor = replace(tensor, shape=self.group.global_shapes[param], shard_sets=(*sets, shards))
            states[name] = tensor

    def _find_starts(self, layout: FlatLayout) -> dict[str, tuple[Layout, list[tuple[int, int]]]]:
        """Parameter to its layout, and to the ranks that hold elements of it, with the start in each one's tensor."""
        starts = self.shards_by_layout.get(id(layout))
        if starts is None:
            starts = self.shards_by_layout[id(layout)] = {}
            split = Layout()
            for param, axis in layout.axes().items():
                axes = self.group.axes.get(param, ())
                split = split if split.flat and split.flat[0] is axis and split.axes == axes else Layout(axes, (axis,))
                starts[param] = split, []
            for rank in self.files:
                for param, span in layout.spans(rank).items():
                    starts[param][1].append((rank, span.start))
        return starts

    def add_copies(self, name: str, tensors: Mapping[int, TensorRef]) -> None:
        """Add a state that is a tensor of one element, copied on every rank."""
        rank, first = next(iter(tensors.items()))
        if not self._check_dtype(name, tensors) or not self._check_present(name, self._ranks_without(tensors)):
            return
        differing = [other for other, ref in tensors.items() if self.checksums.has_same_bytes(first, ref) is False]
        self.problems.wrong += [
            f"{self.files[other]}: of another run: {name} of {self.group.label} differs from {self.files[rank]}"
            for other in differing
        ]
        box = Box.full(first.shape)
        fragments = tuple(Fragment(box=box, ref=ref, replica=copy) for copy, ref in enumerate(tensors.values()))
        self._share_state(name, StateIndex(dtype=first.dtype, global_shape=first.shape, fragments=fragments))

    def add_number(self, name: str, numbers: Mapping[int, object]) -> None:
        """Add a state that is a Python number, equal on every rank."""
        self.problems.check_agreement(
            f"{name} of {self.group.label}", {self.files[rank]: n for rank, n in numbers.items()}
        )
        number = next(iter(numbers.values()))
        if self._check_present(name, self._ranks_without(numbers)) and isinstance(number, int | float):
            self._share_state(name, state_from_number(number))

    def _share_state(self, name: str, state: StateIndex) -> None:
        for param, states in self.states.items():
            before = states.get(name) if param in self.group.global_shapes else None
            states[name] = merge_counts([before, state]) if isinstance(before, StateIndex) else state

    def _ranks_without(self, values: Mapping[int, object]) -> list[int]:
        return [shard.rank for shard in self.group.shards if shard.rank not in values and shard.weight.numel]

    def _check_present(self, name: str, absent: Sequence[int]) -> bool:
        self.problems.wrong += [
            f"{self.files[rank]}: {self.group.label} has no state {name}, which other ranks have" for rank in absent
        ]
        return not absent

    def _check_dtype(self, name: str, tensors: Mapping[int, TensorRef]) -> bool:
        dtypes = {self.files[rank]: str(ref.dtype) for rank, ref in tensors.items()}
        self.problems.check_agreement(f"the dtype of {name} of {self.group.label}", dtypes)
        return len(set(dtypes.values())) == 1

    def find_layout(self, layouts: Sequence[FlatLayout], tensors: Mapping[int, TensorRef]) -> FlatLayout | None:
        """The layout that fits the length of every tensor; None if none does, or if several do and they disagree."""
        if not all(len(ref.shape) == 1 and ref.is_contiguous for ref in tensors.values()):
            return None
        matches = [
            layout for layout in layouts if all(ref.shape[0] in layout.lengths(rank) for rank, ref in tensors.items())
        ]
        if len(matches) < 2:
            return matches[0] if matches else None
        first, *others = [[layout.spans(rank) for rank in tensors] for layout in matches]
        params = [param for spans in first for param in spans]
        is_unsplit = len(set(params)) == len(params)
        return matches[0] if is_unsplit and all(other == first for other in others) else None

    def describe_misfit(self, name: str, tensors: Mapping[int, TensorRef]) -> str:
        """The message for a state whose tensors fit no layout of the group."""
        actual = ", ".join(str(list(ref.shape)) for ref in tensors.values())
        ranges = (self.group.layouts[0].lengths(rank) for rank in tensors)
        expected = ", ".join(f"{r[0]}" if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in ranges)
        return (
            f"{self.group.label} ({', '.join(list(self.group.shapes)[:3])}, ...): state {name} has the shape {actual} "
            f"on rank {', '.join(map(str, tensors))}; expected {expected} elements: those of the parameters and of the "
            "padding"
        )
