"""What the optimizer steps as one tensor: the parameters of a group, flat, in pieces on the ranks.

Every rank has a weight and named states for it. A state is

- one number for all (`step`): a Python number, which must agree, or a tensor of one element, copied on ranks;
- one number per element: a tensor as long as a layout of the group says;
- anything else, which cannot be given to parameters: kept as an extra, and told (`Index.lost`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ucp.contract.layouts import FlatLayout
from ucp.contract.ranks import Checksums, Problems, make_rank_extras
from ucp.core.index import STEP, WEIGHT, Extra, Fragment, LostStates, ParamGroup, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.core.union import ShardedTensor, ShardSet, StateSource, StoredShard, state_from_number, state_from_scalar
from ucp.errors import listed
from ucp.io.pickle.fields import Shape, described

_UNPLACED = "states of the optimizer that cannot be given to single parameters are kept as extras (optimizer_state/...)"


@dataclass(slots=True, kw_only=True)
class OptimizerPart:
    """The optimizer's view of a checkpoint."""

    states: dict[str, dict[str, StateSource]] = field(default_factory=dict)
    """Trained parameter to state name to its pieces; `weight` where there is a master."""
    groups: list[ParamGroup] = field(default_factory=list)
    """Parameter groups."""
    extras: list[Extra] = field(default_factory=list)
    """What is no state of a parameter."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""
    dropped: list[str] = field(default_factory=list)
    """What was left out, and why."""
    lost: dict[str, LostStates] = field(default_factory=dict)
    """Parameters that lack states which cannot be given to single parameters."""

    def lose(self, params: Iterable[str], unplaced: Sequence[str]) -> None:
        """Tell of states of `params` that are kept as extras; `unplaced`: each with what it is."""
        loss = LostStates(reason=f"{_UNPLACED}:\n{listed(unplaced)}\nthey are of")
        self.lost |= dict.fromkeys(params, loss)
        self.notes.append(f"{_UNPLACED}; what needs the optimizer's states cannot be written:\n{listed(unplaced)}")

    def take_group_steps(self) -> None:
        """Give a `step` that stands in a group only to its parameters (apex and early FusedAdam keep it there).

        A group whose parameters have a step of their own keeps its stale one among the hyper-parameters only.
        """
        for number, group in enumerate(self.groups):
            stepped = [name for name in group.params if self.states.get(name, {}).keys() - {"weight"}]
            has_own = any(STEP in self.states[name] for name in stepped)
            state = state_from_scalar(group.hyper.get(STEP))
            if state is None or has_own or not stepped:
                continue
            for name in stepped:
                self.states[name][STEP] = state
            self.notes.append(f"step of group {number} is taken from the parameter group: the states have none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds of a flat group."""

    rank: int
    """The rank, among those that share the group."""
    file: str
    """Name of its file, for messages."""
    weight: TensorRef
    """The weights, one-dimensional."""
    states: Mapping[str, object]
    """State name to value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroupStates:
    """Parameters that are flat together."""

    label: str
    """Name for messages, e.g. "group 0"."""
    shapes: Mapping[str, Shape]
    """Parameter to global shape, in the order of the flat tensor."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Parameter to its global name, where that is another."""
    layouts: tuple[FlatLayout, ...]
    """Layouts its tensors can have; the first that fits all ranks is taken."""
    state_layouts: tuple[FlatLayout, ...] = ()
    """Further layouts that states can have, not the weights."""
    shards: tuple[Shard, ...]
    """One per rank."""
    coords: Mapping[str, int] = field(default_factory=dict)
    """Place of these ranks along other axes."""
    axes: tuple[AxisLayout, ...] = ()
    """How the parameters lie over those."""


def add_flat_group(part: OptimizerPart, group: FlatGroupStates, checksums: Checksums, problems: Problems) -> None:
    """Add the states of every parameter of `group`; what cannot be understood goes to `problems`."""
    reader = _Reader(part, group, checksums, problems)
    weights = {shard.rank: shard.weight for shard in group.shards}
    layout = reader.fitting(group.layouts, weights)
    if layout is None:
        problems.unsupported.append(reader.misfit(WEIGHT, weights))
    else:
        reader.add_elementwise(WEIGHT, weights, layout)
    for name in dict.fromkeys(name for shard in group.shards for name in shard.states):
        reader.add(name)
    if reader.unplaced:
        part.lose(reader.states, reader.unplaced)


class _Reader:
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
        self.places: dict[int, dict[str, tuple[Layout, list[tuple[int, int]]]]] = {}

    def add(self, name: str) -> None:
        """Add state `name`, whatever it is."""
        label, shards = self.group.label, self.group.shards
        values = {shard.rank: shard.states[name] for shard in shards if shard.states.get(name) is not None}
        tensors = {rank: value for rank, value in values.items() if isinstance(value, TensorRef)}
        numbers = {r: value for r, value in values.items() if r not in tensors and state_from_scalar(value) is not None}
        if not values:
            self.part.dropped.append(f"{label}: state {name} is None everywhere")
        elif len(tensors) == len(values):
            layout = self.fitting(self.group.layouts + self.group.state_layouts, tensors)
            if layout is not None:
                self.add_elementwise(name, tensors, layout)
            elif all(ref.numel == 1 for ref in tensors.values()):
                self.add_copies(name, tensors)
            else:
                self.keep(name, values, self.misfit(name, tensors))
        elif len(numbers) == len(values):
            self.add_number(name, numbers)
        elif tensors or numbers:
            shown = {self.files[rank]: described(value) for rank, value in values.items()}
            self.problems.check_agreement(f"the kind of {name} of {label}", shown)
        else:
            self.keep(name, values, f"{label}: state {name} is {described(next(iter(values.values())))}")

    def keep(self, name: str, values: Mapping[int, object], what: str) -> None:
        """Keep a state as an extra, as it cannot be given to parameters."""
        self.part.extras += make_rank_extras(f"optimizer_state/{self.group.label}/{name}", values, self.checksums)
        self.unplaced.append(what)

    def add_elementwise(self, name: str, tensors: Mapping[int, TensorRef], layout: FlatLayout) -> None:
        """Add a state with a number per element."""
        lacking = [rank for rank in self.files if rank not in tensors and layout.spans(rank)]
        if not self._one_type(name, tensors) or not self._all_have(name, lacking):
            return
        first = next(iter(tensors.values()))
        whole = Layout(self.group.axes)
        places = self.places.get(id(layout))
        if (
            places is None
        ):  # of parameters with elements: the ranks that have some, and where it begins in their tensors
            places = self.places[id(layout)] = {}
            cut = Layout()
            for param, axis in layout.axes().items():
                cut = cut if cut.flat and cut.flat[0] is axis else Layout(self.group.axes, (axis,))
                places[param] = cut, []
            for rank in self.files:
                for param, span in layout.spans(rank).items():
                    places[param][1].append((rank, span.start))
        for (param, shape), states in zip(self.group.shapes.items(), self.states.values(), strict=True):
            if param not in places:
                shards = ShardSet(whole, (StoredShard(self.group.coords, first),))
            elif layout.ranks == 1:
                ref = first.strided(places[param][1][0][1], shape, contiguous_strides(shape))
                shards = ShardSet(whole, (StoredShard(self.group.coords, ref),))
            else:
                cut, starts = places[param]
                shards = ShardSet(
                    cut, tuple([StoredShard(self.coords[rank], tensors[rank], start) for rank, start in starts])
                )
            states[name] = ShardedTensor(dtype=first.dtype, shape=shape, shard_sets=(shards,))

    def add_copies(self, name: str, tensors: Mapping[int, TensorRef]) -> None:
        """Add a state that is one tensor of one element, of which every rank has a copy."""
        rank, first = next(iter(tensors.items()))
        if not self._one_type(name, tensors) or not self._all_have(name, self._without(tensors)):
            return
        differing = [other for other, ref in tensors.items() if self.checksums.has_same_bytes(first, ref) is False]
        self.problems.wrong += [
            f"{self.files[other]}: of another run: {name} of {self.group.label} differs from {self.files[rank]}"
            for other in differing
        ]
        box = Box.full(first.shape)
        fragments = tuple(Fragment(box=box, ref=ref, replica=copy) for copy, ref in enumerate(tensors.values()))
        self._give_all(name, StateIndex(dtype=first.dtype, global_shape=first.shape, fragments=fragments))

    def add_number(self, name: str, numbers: Mapping[int, object]) -> None:
        """Add a state that is a Python number, equal on every rank."""
        self.problems.check_agreement(
            f"{name} of {self.group.label}", {self.files[rank]: n for rank, n in numbers.items()}
        )
        number = next(iter(numbers.values()))
        if self._all_have(name, self._without(numbers)) and isinstance(number, int | float):
            self._give_all(name, state_from_number(number))

    def _give_all(self, name: str, state: StateIndex) -> None:
        for own in self.states.values():
            own[name] = state

    def _without(self, values: Mapping[int, object]) -> list[int]:
        return [shard.rank for shard in self.group.shards if shard.rank not in values and shard.weight.numel]

    def _all_have(self, name: str, lacking: Sequence[int]) -> bool:
        self.problems.wrong += [
            f"{self.files[rank]}: {self.group.label} has no state {name}, other ranks have" for rank in lacking
        ]
        return not lacking

    def _one_type(self, name: str, tensors: Mapping[int, TensorRef]) -> bool:
        dtypes = {self.files[rank]: str(ref.dtype) for rank, ref in tensors.items()}
        self.problems.check_agreement(f"the type of {name} of {self.group.label}", dtypes)
        return len(set(dtypes.values())) == 1

    def fitting(self, layouts: Sequence[FlatLayout], tensors: Mapping[int, TensorRef]) -> FlatLayout | None:
        """The layout that fits the length of every tensor; None when none does, or several that differ."""
        if not all(len(ref.shape) == 1 and ref.is_contiguous for ref in tensors.values()):
            return None
        fitting = [own for own in layouts if all(ref.shape[0] in own.lengths(rank) for rank, ref in tensors.items())]
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        starts = [[own.spans(rank) for rank in tensors] for own in fitting]
        params = [param for own in starts[0] for param in own]
        same = all(own == starts[0] for own in starts) and len(set(params)) == len(params)  # none is cut
        return fitting[0] if same else None

    def misfit(self, name: str, tensors: Mapping[int, TensorRef]) -> str:
        """That the tensors of a state have none of the lengths that they can have."""
        shown = ", ".join(str(list(ref.shape)) for ref in tensors.values())
        ranges = (self.group.layouts[0].lengths(rank) for rank in tensors)
        expected = ", ".join(f"{own[0]}" if len(own) == 1 else f"{own[0]} to {own[-1]}" for own in ranges)
        return (
            f"{self.group.label} ({', '.join(list(self.group.shapes)[:3])}, ...): state {name} has the shape {shown} "
            f"on rank {', '.join(map(str, tensors))}; expected {expected} elements, one for each of the parameters and "
            "of the padding. What its elements belong to is not known"
        )
