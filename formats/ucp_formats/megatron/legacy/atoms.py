"""The union: parts of parameters, held by ranks, put together into atoms.

A parameter's rule says how it lies over the tensor-parallel ranks (of the model, or of an expert); which stage, chunk
and expert-parallel rank has it, its files do. Ranks that differ in nothing else hold copies: those are kept as
replicas, to be compared. Where the optimizer has a master, that is the atom's weight, and the tensors of the model are
replicas of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from ucp.contract.axes import along
from ucp.contract.scalars import scalar_state
from ucp.core.index import AtomIndex, Kind, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.tensor import TensorRef
from ucp.core.union import ShardedTensor, Shards, Union, joined_counts
from ucp.errors import MissingFileError, counted, listed
from ucp_formats.megatron.legacy.files import LegacyRun
from ucp_formats.megatron.legacy.model import Held, LegacyModel, Slot
from ucp_formats.megatron.legacy.optimizer.states import LegacyStates
from ucp_formats.megatron.param_groups.rules import is_expert
from ucp_formats.megatron.run.mesh import data_parallel, known, stages

__all__ = ["atoms_of"]

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
        for name in model.family.sorted(parts)
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
        return ShardedTensor(dtype=dtype, shape=shape, parts=(Shards(layout, tuple(stored)),))

    coords = {part.slot: _coordinates(run, part) for part in parts}
    trained = {slot: states.tensors[slot] for slot in coords if slot in states.tensors}
    keys = dict.fromkeys(key for own in trained.values() for key in own)
    kind = Kind.PARAMETER if trained or states.is_empty else Kind.FROZEN
    tensors = {key: sharded({slot: own[key] for slot, own in trained.items() if key in own}) for key in keys}
    return union.atom(
        parts[0].name,
        kind=Kind.BUFFER if is_buffer else kind,
        layout=layout,
        states={**tensors, **_numbers(coords, states)},
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
    return Layout((*_mesh(run, match.name, coords), *known(by_rule, f"family {model.family.name}"))), shape


def _coordinates(run: LegacyRun, part: Held) -> dict[str, int]:
    """Where the rank of a stored tensor stands along every axis; of `dp`, among those that hold the same."""
    where = run.ranks[part.slot.rank].place
    of_expert = run.grid.expert_part(where)
    copy = of_expert.copy if is_expert(part.name) else run.grid.rank(where) // run.grid.tp
    ranks = {"pp": where.pp, "vpp": part.slot.chunk, "ep": where.ep, "dp": copy}
    return {**ranks, "tp": where.tp, "etp": of_expert.etp}


def _mesh(run: LegacyRun, name: str, coords: Sequence[Mapping[str, int]]) -> tuple[AxisLayout, ...]:
    """The axes besides those of the rule, by where its parts are."""
    expert = is_expert(name)
    axes = stages(run.grid.pp, run.vpp, {(own["pp"], own["vpp"]) for own in coords}, _FOLDERS)
    if expert:
        axes += along("ep", run.grid.ep, _FOLDERS, {own["ep"] for own in coords})
    degree = data_parallel(run.arguments.topology(), expert=expert)
    copies = max(degree, *(1 + own["dp"] for own in coords))
    return axes + along("dp", copies, f"arguments of {run.ranks[0].name}")


def _numbers(slots: Iterable[Slot], states: LegacyStates) -> dict[str, StateIndex]:
    """States that are one number: the first rank's, and copies on the others."""
    counts: dict[str, list[StateIndex]] = {}
    for slot in slots:
        for key, value in states.numbers.get(slot, {}).items():
            state = scalar_state(value)
            if state is not None:
                counts.setdefault(key, []).append(state)
    return {key: joined_counts(own) for key, own in counts.items()}
