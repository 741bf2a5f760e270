"""What the optimizer files of ranks say, whatever their shape: states of stored tensors, and their groups.

The union: parts of parameters, held by ranks, put together into atoms.

A parameter's rule says how it lies over the tensor-parallel ranks (of the model, or of an expert); which stage, chunk
and expert-parallel rank has it, its files do. Ranks that differ in nothing else hold copies: those are kept as
replicas, to be compared. Where the optimizer has a master, that is the atom's weight, and the tensors of the model are
replicas of it.
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
from ucp.core.union import ShardedTensor, ShardSet, Union, merge_counts, state_from_scalar
from ucp.errors import MissingFileError, counted, listed
from ucp.io.pickle.fields import mapping, sequence
from ucp_formats.megatron.buffers.state_buffer import Candidate
from ucp_formats.megatron.groups import SavedGroup, is_expert
from ucp_formats.megatron.legacy.files import LegacyRun
from ucp_formats.megatron.legacy.model import Held, LegacyModel, Slot
from ucp_formats.megatron.mesh import count_replicas, pipeline_axes, with_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer of a rank."""

    where: str
    """Which it is, for messages."""
    chain: int | None
    """Its number in a chain; None for the only one."""
    saved: Mapping[object, object]
    """What the model file says of it."""
    held: tuple[Held, ...]
    """Parameters that it may have states of, in registration order, one per stored tensor; buffers left out."""
    arguments: Mapping[str, object]
    """Arguments of the run, which decide on groups; empty where they were not saved."""

    @property
    def inner(self) -> Mapping[object, object]:
        """What torch's optimizer saved, where another one wraps it."""
        found = self.saved.get("optimizer")
        return found if isinstance(found, dict) else self.saved

    @property
    def is_whole(self) -> bool:
        """Whether it has its states by number (and is not distributed)."""
        return "state" in self.saved or "state" in self.inner

    def groups(self) -> Iterator[tuple[SavedGroup, Sequence[object]]]:
        """Its groups, each with the numbers of its parameters, where it has them. Raises MalformedError."""
        for own in sequence(self.inner.get("param_groups"), f"param_groups in {self.where}"):
            group = mapping(own, f"a group in {self.where}")
            hyper = {str(key): value for key, value in group.items() if key not in ("params", "param_names")}
            params = sequence(group["params"], f"params of a group in {self.where}") if "params" in group else ()
            yield SavedGroup(chain=None, hyper=hyper), params


@dataclass(slots=True, kw_only=True)
class LegacyStates:
    """States by the stored tensor that they belong to."""

    tensors: dict[Slot, dict[str, TensorRef]] = field(default_factory=dict)
    """State name to its elements, of the shape of the stored tensor; the master is `weight`."""
    numbers: dict[Slot, dict[str, object]] = field(default_factory=dict)
    """State name to one number for the whole tensor (`step`)."""
    groups: list[SavedGroup] = field(default_factory=list)
    """Groups, each once, however many ranks have it."""
    group_of: dict[Slot, int] = field(default_factory=dict)
    """Number of the group of a stored tensor, where it is known."""
    extras: list[Extra] = field(default_factory=list)
    """What says nothing of a parameter."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""
    dropped: list[str] = field(default_factory=list)
    """What is not carried, with the reason."""
    lost: dict[str, LostStates] = field(default_factory=dict)
    """Parameters whose group is not known, and why."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no state at all."""
        return not self.tensors and not self.numbers

    def group(self, saved: SavedGroup) -> int:
        """Number of the group with these hyper-parameters, which is added when it is new."""
        for number, group in enumerate(self.groups):
            if group.chain == saved.chain and Checksums(()).is_same(dict(group.hyper), dict(saved.hyper)):
                return number
        self.groups.append(saved)
        return len(self.groups) - 1


def candidate(name: str, held: Held) -> Candidate:
    """A stored tensor as what may be found by its contents."""
    whole = Box.full(held.ref.shape)
    return Candidate(name=name, local_shape=held.ref.shape, pairs=(RegionPair(whole, whole),), refs=(held.ref,))


_FOLDERS = "names of folders"
"""Where it is known from which stage, chunk or expert-parallel rank holds a parameter."""


def atoms_of(run: LegacyRun, model: LegacyModel, states: LegacyStates) -> dict[str, AtomIndex]:
    """Atoms in the order of the model. Raises MissingFileError, FamilyError."""
    parts: dict[str, list[Held]] = {}
    for part in model.held:
        if part.name in model.matches:
            parts.setdefault(part.name, []).append(part)
    lacking: list[str] = []
    layouts = {name: _layout(run, model, own, lacking) for name, own in parts.items()}
    if lacking:
        raise MissingFileError(
            f"{counted(len(lacking), 'parameter')} of {run.folder} with parts that no file holds:\n{listed(lacking)}\n"
            "Copy the folders of all ranks from where they were saved"
        )
    union = Union()
    return {
        name: _atom(run, states, parts[name], layouts[name], union=union, is_buffer=model.matches[name].buffer)
        for name in model.family.sort_canonical(parts)
    }


def _atom(
    run: LegacyRun,
    states: LegacyStates,
    parts: Sequence[Held],
    lies: tuple[Layout, tuple[int, ...]],
    *,
    union: Union,
    is_buffer: bool,
) -> AtomIndex:
    """The atom of a parameter; `lies`: its layout and global shape."""
    layout, shape = lies

    def sharded(refs: Mapping[Slot, TensorRef]) -> ShardedTensor:
        stored = [part.view.of(refs[part.slot], coords[part.slot]) for part in parts if part.slot in refs]
        dtype = next(iter(refs.values())).dtype
        return ShardedTensor(dtype=dtype, shape=shape, shard_sets=(ShardSet(layout, tuple(stored)),))

    coords = {part.slot: _coordinates(run, part) for part in parts}
    trained = {slot: states.tensors[slot] for slot in coords if slot in states.tensors}
    keys = dict.fromkeys(key for own in trained.values() for key in own)
    kind = Kind.PARAMETER if trained or states.is_empty else Kind.FROZEN
    counts: dict[str, list[StateIndex]] = {}  # one number: the first rank's, and copies on the others
    for slot in coords:
        for key, value in states.numbers.get(slot, {}).items():
            if (state := state_from_scalar(value)) is not None:
                counts.setdefault(key, []).append(state)
    tensors = {key: sharded({slot: own[key] for slot, own in trained.items() if key in own}) for key in keys}
    return union.build_atom(
        parts[0].name,
        kind=Kind.BUFFER if is_buffer else kind,
        layout=layout,
        states={**tensors, **{key: merge_counts(own) for key, own in counts.items()}},
        model=sharded({part.slot: part.ref for part in parts}),
    )


def _layout(
    run: LegacyRun, model: LegacyModel, parts: Sequence[Held], lacking: list[str]
) -> tuple[Layout, tuple[int, ...]]:
    """How a parameter lies over the mesh, and its global shape; what no file holds goes to `lacking`."""
    match = model.matches[parts[0].name]
    degrees = {"tp": run.grid.tp, "etp": run.grid.etp}
    axes = {axis: degrees[axis] for axis in match.axes(degrees)}
    coords = [_coordinates(run, part) for part in parts]
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for part, at in zip(parts, coords, strict=True):
        shapes.setdefault(tuple(at[axis] for axis in axes), part.view.shape)
    everywhere = list(product(*map(range, axes.values())))
    missing = [at for at in everywhere if at not in shapes]
    if missing:
        where = ("tensor-parallel rank " + ", ".join(map(str, at)) for at in missing)
        lacking.append(f"{match.name}: {'; '.join(where)}")
        return Layout(), ()
    local_shapes = [shapes[at] for at in everywhere]
    by_rule = match.layout(axes=axes, local_shapes=local_shapes)
    shape = match.global_shape(by_rule, local_shapes)
    is_of_expert = is_expert(match.name)
    outer = pipeline_axes(run.grid.pp, run.vpp, {(own["pp"], own["vpp"]) for own in coords}, _FOLDERS)
    if is_of_expert:
        outer += holder_axes("ep", run.grid.ep, _FOLDERS, {own["ep"] for own in coords})
    degree = count_replicas(run.arguments.topology(), expert=is_of_expert)
    copies = max(degree, *(1 + own["dp"] for own in coords))
    outer += holder_axes("dp", copies, f"arguments of {run.ranks[0].name}")
    return Layout((*outer, *with_source(by_rule, f"family {model.family.name}"))), shape


def _coordinates(run: LegacyRun, part: Held) -> dict[str, int]:
    """Where the rank of a stored tensor stands along every axis; of `dp`, among those that hold the same."""
    where = run.ranks[part.slot.rank].place
    of_expert = run.grid.expert_part(where)
    copy = of_expert.copy if is_expert(part.name) else run.grid.rank(where) // run.grid.tp
    ranks = {"pp": where.pp, "vpp": part.slot.chunk, "ep": where.ep, "dp": copy}
    return {**ranks, "tp": where.tp, "etp": of_expert.etp}
