"""A bucket is what the optimizer steps as one tensor: many parameters, flat, in pieces on the ranks.

Every rank has a weight and named states for a bucket. A state is

- one number for all (`step`): a Python number, which must agree, or a tensor of one element, copied on ranks;
- one number per element: a tensor as long as a layout of the bucket says;
- anything else, which cannot be given to parameters: kept as an extra, and told (`Index.lost`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ucp.contract.problems import Problems
from ucp.contract.rank_extras import Checksums, per_rank_extras
from ucp.contract.scalars import number_state, scalar_state
from ucp.core.fragments import Fragment, Stored
from ucp.core.index import Extra, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.names import WEIGHT
from ucp.core.region import Box
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.io.pickle.fields import Shape, described
from ucp_formats.deepspeed.read.optimizer.flat_layout import FlatLayout, held_by_rank
from ucp_formats.deepspeed.read.optimizer.stored import LaidOut, State, StoredTensor

__all__ = ["Bucket", "BucketStates", "Shard", "bucket_states", "number_state", "scalar_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds of a bucket."""

    rank: int
    """The rank."""
    file: str
    """Name of its file, for messages."""
    weight: TensorRef
    """The weights, one-dimensional."""
    states: Mapping[str, object]
    """State name to value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that are flat together."""

    label: str
    """Name for messages, e.g. "group 0"."""
    shapes: Mapping[str, Shape]
    """Parameter to global shape, in the order of the flat tensor."""
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


@dataclass(slots=True)
class _Places:
    """Where a parameter lies."""

    layout: Layout
    """How its row-major order is cut."""
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Ranks that have some of it, each with the element of its tensor where that begins."""


@dataclass(slots=True)
class BucketStates:
    """States of the parameters of a bucket."""

    states: dict[str, dict[str, State]]
    """Parameter to state name to what is stored of it."""
    extras: list[Extra] = field(default_factory=list)
    """States that say nothing of a parameter."""
    dropped: list[str] = field(default_factory=list)
    """States without a value."""
    unplaced: list[str] = field(default_factory=list)
    """States that cannot be given to parameters, each with what it is."""


def bucket_states(bucket: Bucket, checksums: Checksums, problems: Problems) -> BucketStates:
    """States of every parameter of `bucket`; what cannot be understood goes to `problems`."""
    reader = _Reader(bucket, checksums, problems)
    reader.add_elementwise(WEIGHT, {shard.rank: shard.weight for shard in bucket.shards}, bucket.layouts)
    for name in dict.fromkeys(name for shard in bucket.shards for name in shard.states):
        reader.add(name)
    return reader.found


class _Reader:
    """Reads the states of one bucket."""

    def __init__(self, bucket: Bucket, checksums: Checksums, problems: Problems) -> None:
        self.bucket = bucket
        self.checksums = checksums
        self.problems = problems
        self.found = BucketStates(states={name: {} for name in bucket.shapes})
        self.files = {shard.rank: shard.file for shard in bucket.shards}
        self.coords = {rank: {**bucket.coords, "dp": rank} for rank in self.files}
        self.places: dict[int, dict[str, _Places]] = {}

    def add(self, name: str) -> None:
        """Add state `name`, whatever it is."""
        shards = self.bucket.shards
        values = {shard.rank: shard.states[name] for shard in shards if shard.states.get(name) is not None}
        tensors = {rank: value for rank, value in values.items() if isinstance(value, TensorRef)}
        numbers = {r: value for r, value in values.items() if r not in tensors and scalar_state(value) is not None}
        layouts = self.bucket.layouts + self.bucket.state_layouts
        if not values:
            self.found.dropped.append(f"{self.bucket.label}: state {name} is None everywhere")
        elif len(tensors) == len(values):
            if self._fitting(layouts, tensors) is not None:
                self.add_elementwise(name, tensors, layouts)
            elif all(ref.numel == 1 for ref in tensors.values()):
                self.add_scalar(name, tensors)
            else:
                self.keep(name, values, self._misfit(name, tensors))
        elif len(numbers) == len(values):
            self.add_number(name, numbers)
        elif tensors or numbers:
            shown = {self.files[rank]: described(value) for rank, value in values.items()}
            self.problems.agree(f"the kind of {name} of {self.bucket.label}", shown)
        else:
            self.keep(name, values, f"{self.bucket.label}: state {name} is {described(next(iter(values.values())))}")

    def keep(self, name: str, values: Mapping[int, object], what: str) -> None:
        """Keep a state as an extra, as it cannot be given to parameters."""
        self.found.extras += per_rank_extras(f"optimizer_state/{self.bucket.label}/{name}", values, self.checksums)
        self.found.unplaced.append(what)

    def add_elementwise(self, name: str, tensors: Mapping[int, TensorRef], layouts: Sequence[FlatLayout]) -> None:
        """Add a state with a number per element."""
        layout = self._fitting(layouts, tensors)
        if layout is None:
            self.problems.unsupported.append(self._misfit(name, tensors))
            return
        if not self._check_types(name, tensors):
            return
        if not self._check_all_have(name, [r for r in self.files if r not in tensors and layout.starts_on(r)]):
            return
        first = next(iter(tensors.values()))
        places = self._places(layout)
        whole = Layout(self.bucket.axes)
        for param, shape in self.bucket.shapes.items():
            place = places.get(param)
            if place is None:
                own = LaidOut(whole, (Stored(self.bucket.coords, first),))
            elif layout.ranks == 1:
                ref = first.strided(place.starts[0][1], shape, contiguous_strides(shape))
                own = LaidOut(whole, (Stored(self.bucket.coords, ref),))
            else:
                stored = [Stored(self.coords[rank], tensors[rank], start) for rank, start in place.starts]
                own = LaidOut(place.layout, tuple(stored))
            self.found.states[param][name] = StoredTensor(dtype=first.dtype, shape=shape, parts=(own,))

    def _places(self, layout: FlatLayout) -> dict[str, _Places]:
        """Places of all parameters with elements, found once for all states."""
        if id(layout) not in self.places:
            own = Layout()
            found: dict[str, _Places] = {}
            for param, axis in layout.axes().items():
                own = own if own.flat and own.flat[0] is axis else Layout(self.bucket.axes, (axis,))
                found[param] = _Places(own)
            for rank in self.files:
                for param, start in layout.starts_on(rank).items():
                    found[param].starts.append((rank, start))
            self.places[id(layout)] = found
        return self.places[id(layout)]

    def add_scalar(self, name: str, tensors: Mapping[int, TensorRef]) -> None:
        """Add a state that is one tensor of one element, of which every rank has a copy."""
        if not self._check_types(name, tensors):
            return
        if self._check_all_have(name, self._holders_without(tensors)) and self._check_copies(name, tensors):
            first, *_ = refs = list(tensors.values())
            box = Box.whole(first.shape)
            fragments = tuple(Fragment(box=box, ref=ref, replica=copy) for copy, ref in enumerate(refs))
            self._give_all(name, StateIndex(dtype=first.dtype, global_shape=first.shape, fragments=fragments))

    def add_number(self, name: str, numbers: Mapping[int, object]) -> None:
        """Add a state that is a Python number, equal on every rank."""
        self.problems.agree(f"{name} of {self.bucket.label}", {self.files[rank]: n for rank, n in numbers.items()})
        number = next(iter(numbers.values()))
        if self._check_all_have(name, self._holders_without(numbers)) and isinstance(number, int | float):
            self._give_all(name, number_state(number))

    def _give_all(self, name: str, state: StateIndex) -> None:
        for param in self.bucket.shapes:
            self.found.states[param][name] = state

    def _holders_without(self, values: Mapping[int, object]) -> list[int]:
        return [shard.rank for shard in self.bucket.shards if shard.rank not in values and shard.weight.numel]

    def _check_all_have(self, name: str, lacking: Sequence[int]) -> bool:
        self.problems.wrong += [
            f"{self.files[rank]}: {self.bucket.label} has no state {name}, other ranks have" for rank in lacking
        ]
        return not lacking

    def _check_types(self, name: str, tensors: Mapping[int, TensorRef]) -> bool:
        """Whether all have one type."""
        dtypes = {self.files[rank]: str(ref.dtype) for rank, ref in tensors.items()}
        self.problems.agree(f"the type of {name} of {self.bucket.label}", dtypes)
        return len(set(dtypes.values())) == 1

    def _check_copies(self, name: str, tensors: Mapping[int, TensorRef]) -> bool:
        """Note ranks whose number is known to differ from that of the first: their bytes have other checksums."""
        rank, first = next(iter(tensors.items()))
        differing = [other for other, ref in tensors.items() if self.checksums.same_bytes(first, ref) is False]
        self.problems.wrong += [
            f"{self.files[other]}: of another run: {name} of {self.bucket.label} differs from {self.files[rank]}"
            for other in differing
        ]
        return not differing

    def _fitting(self, layouts: Sequence[FlatLayout], tensors: Mapping[int, TensorRef]) -> FlatLayout | None:
        """The layout that fits the length of every tensor; None when none does, or several that differ."""
        if not all(len(ref.shape) == 1 and ref.is_contiguous for ref in tensors.values()):
            return None
        fitting = [own for own in layouts if all(own.accepts(rank, ref.shape[0]) for rank, ref in tensors.items())]
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        numels = {param: prod(shape) for param, shape in self.bucket.shapes.items()}
        held = [held_by_rank(own, tensors, numels) for own in fitting]
        return fitting[0] if all(other == held[0] for other in held) else None

    def _misfit(self, name: str, tensors: Mapping[int, TensorRef]) -> str:
        bucket = self.bucket
        numels = {param: prod(shape) for param, shape in bucket.shapes.items()}
        by_rank = held_by_rank(bucket.layouts[0], tensors, numels)
        expected = [sum(held.numel for held in own.values()) for own in by_rank.values()]
        lengths = ", ".join(str(list(ref.shape)) for ref in tensors.values())
        return (
            f"{bucket.label} ({', '.join(list(bucket.shapes)[:3])}, ...): state {name} has the shape {lengths} on rank "
            f"{', '.join(map(str, tensors))}; expected {', '.join(map(str, expected))} elements and padding, one for "
            "each element of the parameters. What its elements belong to is not known"
        )
