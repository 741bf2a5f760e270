"""Optimizer states of all ranks, and their union with the model's tensors into atoms.

The family's rule for a parameter gives its layout over tensor-parallel ranks; stage, chunk and expert-parallel rank
follow from the files that hold it. Ranks that differ only along other axes hold copies, which are kept as replicas and
compared. If the optimizer has a master, it is the atom's weight, and the model's tensors are replicas of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from ucp.contract.layouts import holder_axes
from ucp.contract.ranks import Checksums
from ucp.core.index import AtomIndex, Extra, Kind, LostStates, StateIndex
from ucp.core.layout import Layout
from ucp.core.region import Box, RegionPair
from ucp.core.tensor import TensorRef
from ucp.core.union import ShardedTensor, ShardSet, StoredShard, Union, merge_counts, state_from_scalar
from ucp.errors import MissingFileError, format_count, format_list
from ucp.io.pickle.fields import require_mapping, require_sequence
from ucp_formats.megatron.buffers.state_buffer import Candidate
from ucp_formats.megatron.groups import SavedGroup, is_expert
from ucp_formats.megatron.legacy.files import LegacyRun
from ucp_formats.megatron.legacy.model import LegacyModel, RankParam, Slot
from ucp_formats.megatron.mesh import count_replicas, pipeline_axes, with_source

_FOLDERS = "names of folders"
"""Where the layout over stages, chunks and expert-parallel ranks is known from, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptimizer:
    """One optimizer of a rank."""

    where: str
    """Its rank and kind, for messages."""
    chain: int | None
    """Its number in a ChainedOptimizer; None for a single optimizer."""
    saved: Mapping[object, object]
    """Its entry in the model file."""
    params: tuple[RankParam, ...]
    """Trainable parameters that it may have states of, in registration order, one per stored tensor."""
    arguments: Mapping[str, object]
    """Arguments of the run, which determine the groups; empty if they were not saved."""

    @property
    def inner(self) -> Mapping[object, object]:
        """State of torch's optimizer, which another optimizer may wrap."""
        inner = self.saved.get("optimizer")
        return inner if isinstance(inner, dict) else self.saved

    @property
    def is_plain(self) -> bool:
        """Whether it is not a distributed optimizer: its states are in the model file, by number."""
        return "state" in self.saved or "state" in self.inner

    def groups(self) -> Iterator[tuple[SavedGroup, Sequence[object]]]:
        """Its groups, each with the numbers of its parameters if they are recorded. Raises MalformedError."""
        for entry in require_sequence(self.inner.get("param_groups"), f"param_groups in {self.where}"):
            group = require_mapping(entry, f"a group in {self.where}")
            hyper = {str(key): value for key, value in group.items() if key not in ("params", "param_names")}
            params = (
                require_sequence(group["params"], f"params of a group in {self.where}") if "params" in group else ()
            )
            yield SavedGroup(chain=None, hyper=hyper), params


@dataclass(slots=True, kw_only=True)
class LegacyStates:
    """Optimizer states by stored tensor."""

    tensors: dict[Slot, dict[str, TensorRef]] = field(default_factory=dict)
    """State name to its elements, in the shape of the stored tensor; the master is `weight`."""
    numbers: dict[Slot, dict[str, object]] = field(default_factory=dict)
    """State name to a single number (`step`)."""
    groups: list[SavedGroup] = field(default_factory=list)
    """Distinct groups of all ranks."""
    group_of: dict[Slot, int] = field(default_factory=dict)
    """Number of the group of a stored tensor, if known."""
    extras: list[Extra] = field(default_factory=list)
    """Optimizer entries that belong to no parameter."""
    notes: list[str] = field(default_factory=list)
    """Inferences, for the user."""
    dropped: list[str] = field(default_factory=list)
    """Lines for `Index.dropped`."""
    lost: dict[str, LostStates] = field(default_factory=dict)
    """Parameters whose group is unknown, and why."""

    def add_group(self, group: SavedGroup) -> int:
        """Number of the group with these hyper-parameters, which is added if it is new."""
        for number, other in enumerate(self.groups):
            if other.chain == group.chain and Checksums(()).is_same(dict(other.hyper), dict(group.hyper)):
                return number
        self.groups.append(group)
        return len(self.groups) - 1


def to_candidate(name: str, param: RankParam) -> Candidate:
    """The stored tensor, to be searched for by its contents."""
    box = Box.full(param.ref.shape)
    return Candidate(name=name, local_shape=param.ref.shape, pairs=(RegionPair(box, box),), refs=(param.ref,))


def build_atoms(run: LegacyRun, model: LegacyModel, states: LegacyStates) -> dict[str, AtomIndex]:
    """Atoms in the order of the model. Raises MissingFileError, FamilyError."""
    params_by_name: dict[str, list[RankParam]] = {}
    for param in model.params:
        if param.name in model.matches:
            params_by_name.setdefault(param.name, []).append(param)
    missing: list[str] = []
    layouts = {name: _find_layout(run, model, params, missing) for name, params in params_by_name.items()}
    if missing:
        raise MissingFileError(
            f"expected all parts of every parameter in {run.folder}; "
            f"{format_count(len(missing), 'parameter has', 'parameters have')} parts that are in no file:\n"
            f"{format_list(missing)}\nCopy the folders of all ranks from where they were saved"
        )
    union = Union()
    return {
        name: _build_atom(
            run, states, params_by_name[name], *layouts[name], union=union, is_buffer=model.matches[name].buffer
        )
        for name in model.family.sort_canonical(params_by_name)
    }


def _build_atom(
    run: LegacyRun,
    states: LegacyStates,
    params: Sequence[RankParam],
    layout: Layout,
    shape: tuple[int, ...],
    *,
    union: Union,
    is_buffer: bool,
) -> AtomIndex:
    coords = {param.slot: _coordinates(run, param) for param in params}

    def to_sharded(refs: Mapping[Slot, TensorRef]) -> ShardedTensor:
        stored = [
            StoredShard(coords[param.slot], param.view(refs[param.slot])) for param in params if param.slot in refs
        ]
        dtype = next(iter(refs.values())).dtype
        return ShardedTensor(dtype=dtype, shape=shape, shard_sets=(ShardSet(layout, tuple(stored)),))

    trained = {slot: states.tensors[slot] for slot in coords if slot in states.tensors}
    has_states = bool(states.tensors or states.numbers)
    kind = Kind.PARAMETER if trained or not has_states else Kind.FROZEN
    counts: dict[str, list[StateIndex]] = {}  # the first rank's count, and the other ranks' as copies
    for slot in coords:
        for key, value in states.numbers.get(slot, {}).items():
            if (state := state_from_scalar(value)) is not None:
                counts.setdefault(key, []).append(state)
    keys = dict.fromkeys(key for refs in trained.values() for key in refs)
    tensors = {key: to_sharded({slot: refs[key] for slot, refs in trained.items() if key in refs}) for key in keys}
    return union.build_atom(
        params[0].name,
        kind=Kind.BUFFER if is_buffer else kind,
        layout=layout,
        states={**tensors, **{key: merge_counts(copies) for key, copies in counts.items()}},
        model=to_sharded({param.slot: param.ref for param in params}),
    )


def _find_layout(
    run: LegacyRun, model: LegacyModel, params: Sequence[RankParam], missing: list[str]
) -> tuple[Layout, tuple[int, ...]]:
    """Layout over the mesh and global shape of a parameter; ranks without a file for it are added to `missing`."""
    match = model.matches[params[0].name]
    degrees = {"tp": run.grid.tp, "etp": run.grid.etp}
    axes = {axis: degrees[axis] for axis in match.axes(degrees)}
    coords = [_coordinates(run, param) for param in params]
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for param, place in zip(params, coords, strict=True):
        shapes.setdefault(tuple(place[axis] for axis in axes), param.elements.shape)
    ranks = list(product(*map(range, axes.values())))
    without_file = [rank for rank in ranks if rank not in shapes]
    if without_file:
        lines = ("tensor-parallel rank " + ", ".join(map(str, rank)) for rank in without_file)
        missing.append(f"{match.name}: {'; '.join(lines)}")
        return Layout(), ()
    local_shapes = [shapes[rank] for rank in ranks]
    by_rule = match.layout(axes=axes, local_shapes=local_shapes)
    shape = match.global_shape(by_rule, local_shapes)
    is_of_expert = is_expert(match.name)
    outer = pipeline_axes(run.grid.pp, run.vpp, {(place["pp"], place["vpp"]) for place in coords}, _FOLDERS)
    if is_of_expert:
        outer += holder_axes("ep", run.grid.ep, _FOLDERS, {place["ep"] for place in coords})
    degree = count_replicas(run.arguments.topology(), expert=is_of_expert)
    copies = max(degree, *(1 + place["dp"] for place in coords))
    outer += holder_axes("dp", copies, f"arguments of {run.ranks[0].name}")
    return Layout((*outer, *with_source(by_rule, f"family {model.family.name}"))), shape


def _coordinates(run: LegacyRun, param: RankParam) -> dict[str, int]:
    """Coordinates of the rank that holds the parameter; `dp` counts the ranks that hold a copy."""
    place = run.ranks[param.slot.rank].place
    part = run.grid.expert_part(place)
    copy = part.copy if is_expert(param.name) else run.grid.rank(place) // run.grid.tp
    ranks = {"pp": place.pp, "vpp": param.slot.chunk, "ep": place.ep, "dp": copy}
    return {**ranks, "tp": place.tp, "etp": part.etp}
