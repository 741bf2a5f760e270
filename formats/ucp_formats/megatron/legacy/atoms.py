"""The union: parts of parameters, held by ranks, put together into atoms.

A parameter's rule says how it lies over the tensor-parallel ranks (of the model, or of an expert); which stage, chunk
and expert-parallel rank has it, its files do. Ranks that differ in nothing else hold copies: those are kept as
replicas, to be compared. Where the optimizer has a master, that is the atom's weight, and the tensors of the model are
replicas of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ucp.contract.scalars import scalar_state
from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Kind, StateIndex
from ucp.core.layout import AxisLayout, Layout, Overlap, Placed, place
from ucp.core.names import WEIGHT
from ucp.core.tensor import TensorRef
from ucp.errors import MissingFileError, counted, listed
from ucp.families.family import Match
from ucp_formats.megatron.legacy.files import LegacyRun
from ucp_formats.megatron.legacy.model import Held, LegacyModel, Slot
from ucp_formats.megatron.legacy.optimizer.states import LegacyStates
from ucp_formats.megatron.legacy.views import fragments
from ucp_formats.megatron.param_groups.rules import is_expert
from ucp_formats.megatron.run.mesh import along, data_parallel, known, stages

__all__ = ["atoms_of"]

_FOLDERS = "names of folders"
"""Where it is known from which stage, chunk or expert-parallel rank holds a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One rank's part of a parameter."""

    held: Held
    """What it stores."""
    coords: Mapping[str, int]
    """Where it stands along every axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Laid:
    """A parameter, laid out."""

    match: Match
    """Its rule."""
    parts: tuple[_Part, ...]
    """Its parts, copies among them, in the order of ranks."""
    layout: Layout
    """How it lies over the mesh."""
    global_shape: tuple[int, ...]
    """Elements per dim."""
    placed: tuple[tuple[Placed, ...], ...]
    """Boxes that each part is made of."""

    def state(self, layers: Sequence[Mapping[Slot, TensorRef]]) -> StateIndex | None:
        """The state whose elements are `layers`, of which the first that holds anything is taken, the others compared.

        None when none of them holds anything.
        """
        found: list[Fragment] = []
        copies = 0
        ranks = prod(axis.parts for axis in self.layout.axes)
        for layer in layers:
            counts: dict[tuple[int, ...], int] = {}
            for part, placed in zip(self.parts, self.placed, strict=True):
                ref = layer.get(part.held.slot)
                if ref is not None:
                    at = tuple(part.coords.values())
                    copy = counts[at] = counts.get(at, 0) + 1
                    pieces = fragments(part.held.view, placed, ref, copy=(copies + copy - 1) * ranks)
                    found += (replace(piece, derived=copies > 0) for piece in pieces)
            copies += max(counts.values(), default=0)
        if not copies:
            return None
        dtype = next(layer[part.held.slot] for layer in layers for part in self.parts if part.held.slot in layer).dtype
        means = any(axis.pattern.overlap is Overlap.MEAN for axis in self.layout.axes)
        overlap = Overlap.MEAN if means else Overlap.EXCLUSIVE
        return StateIndex(dtype=dtype, global_shape=self.global_shape, fragments=tuple(found), overlap=overlap)


def atoms_of(run: LegacyRun, model: LegacyModel, states: LegacyStates) -> dict[str, AtomIndex]:
    """Atoms in the order of the model. Raises MissingFileError, FamilyError."""
    held: dict[str, list[Held]] = {}
    for own in model.held:
        if own.name in model.matches:
            held.setdefault(own.name, []).append(own)
    lacking: list[str] = []
    laid = {name: _laid(run, model, own, lacking) for name, own in held.items()}
    if lacking:
        raise MissingFileError(
            f"{counted(len(lacking), 'parameter')} of {run.folder} with parts that no file holds:\n{listed(lacking)}\n"
            "Copy the folders of all ranks from where they were saved"
        )
    ordered = model.family.sorted(held)
    return {name: _atom(name, found, states) for name in ordered if (found := laid[name]) is not None}


def _laid(run: LegacyRun, model: LegacyModel, held: Sequence[Held], lacking: list[str]) -> _Laid | None:
    match = model.matches[held[0].name]
    degrees = {"tp": run.grid.tp, "etp": run.grid.etp}
    axes = {axis: degrees[axis] for axis in match.axes(degrees)}
    parts = tuple(_Part(held=own, coords=_coordinates(run, own)) for own in held)
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for part in parts:
        shapes.setdefault(tuple(part.coords[axis] for axis in axes), part.held.view.shape)
    everywhere = list(product(*map(range, axes.values())))
    missing = [at for at in everywhere if at not in shapes]
    if missing:
        where = ("tensor-parallel rank " + ", ".join(map(str, at)) for at in missing)
        lacking.append(f"{match.name}: {'; '.join(where)}")
        return None
    local_shapes = [shapes[at] for at in everywhere]
    by_rule = match.layout(axes=axes, local_shapes=local_shapes)
    shape = match.global_shape(by_rule, local_shapes)
    layout = Layout((*_mesh(run, match.name, parts), *known(by_rule, f"family {model.family.name}")))
    placed = tuple(place(layout, shape, coords=part.coords) for part in parts)
    return _Laid(match=match, parts=parts, layout=layout, global_shape=shape, placed=placed)


def _coordinates(run: LegacyRun, own: Held) -> dict[str, int]:
    """Where the rank of a stored tensor stands along every axis; of `dp`, among those that hold the same."""
    where = run.ranks[own.slot.rank].place
    of_expert = run.grid.expert_part(where)
    copy = of_expert.copy if is_expert(own.name) else run.grid.rank(where) // run.grid.tp
    ranks = {"pp": where.pp, "vpp": own.slot.chunk, "ep": where.ep, "dp": copy}
    return {**ranks, "tp": where.tp, "etp": of_expert.etp}


def _mesh(run: LegacyRun, name: str, parts: Sequence[_Part]) -> tuple[AxisLayout, ...]:
    """The axes besides those of the rule, by where its parts were found."""
    expert = is_expert(name)
    found = stages(run.grid.pp, run.vpp, {(own.coords["pp"], own.coords["vpp"]) for own in parts}, _FOLDERS)
    if expert:
        found += along("ep", run.grid.ep, _FOLDERS, {own.coords["ep"] for own in parts})
    degree = data_parallel(run.arguments.topology(), expert=expert)
    copies = max(degree, *(1 + own.coords["dp"] for own in parts))
    return found + along("dp", copies, f"arguments of {run.ranks[0].name}")


def _atom(name: str, laid: _Laid, states: LegacyStates) -> AtomIndex:
    own = {part.held.slot: part.held.ref for part in laid.parts}
    trained = {slot: states.tensors[slot] for slot in own if slot in states.tensors}
    masters = {slot: tensors[WEIGHT] for slot, tensors in trained.items() if WEIGHT in tensors}
    weight = laid.state([masters, own])
    if weight is None:
        weight = StateIndex(dtype=laid.parts[0].held.ref.dtype, global_shape=laid.global_shape, fragments=())
    found = {WEIGHT: weight}
    for key in dict.fromkeys(key for tensors in trained.values() for key in tensors if key != WEIGHT):
        state = laid.state([{slot: tensors[key] for slot, tensors in trained.items() if key in tensors}])
        if state is not None:
            found[key] = state
    found |= _numbers(own, states)
    trained_kind = Kind.PARAMETER if trained or states.is_empty else Kind.FROZEN
    dtype = laid.parts[0].held.ref.dtype
    return AtomIndex(
        name=name,
        global_shape=laid.global_shape,
        kind=Kind.BUFFER if laid.match.buffer else trained_kind,
        states=found,
        model_dtype=dtype if dtype is not weight.dtype else None,
        layout=laid.layout,
    )


def _numbers(own: Iterable[Slot], states: LegacyStates) -> dict[str, StateIndex]:
    """States that are one number: the first rank's, and copies on the others."""
    found: dict[str, list[StateIndex]] = {}
    for slot in own:
        for key, value in states.numbers.get(slot, {}).items():
            state = scalar_state(value)
            if state is not None:
                found.setdefault(key, []).append(state)
    return {
        key: replace(
            copies[0],
            fragments=tuple(replace(own.fragments[0], replica=number) for number, own in enumerate(copies)),
        )
        for key, copies in found.items()
    }
