"""torch_dist checkpoints of megatron-core, read as an index.

1. Read `.metadata`, the objects and the common state; sort the keys by what they are (`keys`).
2. Take the model's tensors apart into parameters, and name them by their family (`unstack`, `names`).
3. Find the optimizer's states, in whichever of the six layouts (`states/`).
4. Assign the parameters to their groups (`groups`); put everything together. The rest becomes extras (`extras`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ucp.contract.locating import Located
from ucp.contract.protocols import SourceOptions
from ucp.core.dtypes import DType
from ucp.core.index import Index, SourceFile
from ucp.core.names import WEIGHT
from ucp.core.tensor import Record
from ucp.errors import MalformedError, UnsupportedError, counted, listed
from ucp.io.dcp.checkpoint import METADATA, Dcp, StoredTensor
from ucp.io.folder import absolute, path_of
from ucp.io.identity import source_file
from ucp_formats.megatron.locate import SavedAs
from ucp_formats.megatron.names import METADATA as BACKEND
from ucp_formats.megatron.names import parse_iteration
from ucp_formats.megatron.param_groups.rules import is_by_named_optimizer
from ucp_formats.megatron.run.modules import is_recorded, modules_extra, modules_keeping, modules_shown, with_modules
from ucp_formats.megatron.run.recorded_sizes import check_gaps, check_recorded
from ucp_formats.megatron.torch_dist.atoms import EMBEDDING, atom_of, tied_output
from ucp_formats.megatron.torch_dist.common import CommonState, SavedObjects, read_common, read_folder, read_objects
from ucp_formats.megatron.torch_dist.extras import dist_extras, is_empty
from ucp_formats.megatron.torch_dist.groups import read_groups
from ucp_formats.megatron.torch_dist.keys import BucketKey, StateKey, parse_bucket_key, parse_state_key
from ucp_formats.megatron.torch_dist.names import DistNames, names_of
from ucp_formats.megatron.torch_dist.placement import layouts_of
from ucp_formats.megatron.torch_dist.shifted import checked_masters
from ucp_formats.megatron.torch_dist.states.buckets import Grid, place_buckets, stored_buckets
from ucp_formats.megatron.torch_dist.states.layouts import DistStates, from_buckets, from_state_keys, gathered_buckets
from ucp_formats.megatron.torch_dist.unstack import Whole, check_tiled, taken_apart

__all__ = ["read_dist"]

_PREFIXES = ("module.", "model.")
"""Prefixes that NeMo gives to all keys of the model."""
_OPTIMIZER = ("optimizer.", "chained_")
_REFORMULATED = "nd_reformulated_orig_global_shape"


@dataclass(slots=True, kw_only=True)
class _Tensors:
    """Stored tensors, by what their keys are."""

    model: dict[str, StoredTensor] = field(default_factory=dict)
    states: dict[StateKey, StoredTensor] = field(default_factory=dict)
    buckets: dict[BucketKey, StoredTensor] = field(default_factory=dict)
    prefix: str = ""
    """What all keys of the model begin with."""

    @property
    def records(self) -> Iterator[Record]:
        """Checksums of all chunks."""
        for group in (self.model, self.states, self.buckets):
            for tensor in group.values():
                yield from tensor.records


@dataclass(frozen=True, slots=True)
class _Model:
    """The model's tensors, taken apart."""

    tensors: _Tensors
    """As stored."""
    names: DistNames
    """Their names."""
    weights: dict[str, Whole]
    """Parameter to its tensor, in the order of registration."""


def read_dist(located: Located[SavedAs], name: str, options: SourceOptions) -> Index:
    """Index of the torch_dist checkpoint at `located`.

    `name`: of the format. `options`: may name the family of the model.
    """
    dcp = read_folder(absolute(located.root))
    objects = read_objects(dcp)
    common = read_common(dcp, objects)
    model = _model(_sorted_out(dcp), common, options, dcp.folder)
    states = _states(dcp, objects, common, model)
    _check_states(states, model, common.arguments.raw, dcp.folder)
    trained = {own: whole.shape for own, whole in model.weights.items() if own in states.fragments}
    modules = _modules(model, common, objects)
    groups = read_groups(common, objects, trained, states.chains, with_modules(common.arguments.raw, modules))
    laid = layouts_of(model.weights, model.names, common, states)
    atoms = {own: atom_of(it, states, groups, model.names, laid.of(own)) for own, it in model.weights.items()}
    aliases = tied_output(atoms, untied=common.arguments.untied)
    checked = checked_masters(atoms, layout=states.layout, tied=bool(aliases))
    return Index(
        path=dcp.folder,
        format=name,
        evidence=located.reasons,
        producer="Megatron (torch_dist), version not recorded",
        topology=common.arguments.topology(),
        step=parse_iteration(located.root.name) if common.iteration is None else common.iteration,
        atoms=checked.atoms,
        groups=groups.groups,
        aliases=aliases,
        extras=(*dist_extras(common, objects), *modules_extra(modules)),
        files=tuple(_files(dcp, common)),
        records=(*common.records, *objects.records, *model.tensors.records),
        notes=(
            *located.notes,
            *model.names.notes,
            *_layout_notes(states, common),
            *states.notes,
            *groups.notes,
            *checked.notes,
            *laid.notes,
        ),
        doubts=laid.doubts,
        dropped=(*checked.dropped, *groups.dropped),
        lost={**groups.lost, **checked.lost},
    )


def _model(tensors: _Tensors, common: CommonState, options: SourceOptions, where: str) -> _Model:
    shapes = {key: tensor.saved.shape for key, tensor in tensors.model.items()}
    names = names_of(shapes, common.arguments.raw, options)
    weights = taken_apart(tensors.model.items(), names.understood, lambda _: None)
    if names.family is not None:
        wholes = {own: whole.shape for own, whole in weights.items()}
        check_recorded(names.family, common.arguments.raw, wholes, where, pads_on_load=True)
    return _Model(tensors, names, {own: weights[own] for own in names.in_order(weights)})


def _modules(model: _Model, common: CommonState, objects: SavedObjects) -> Mapping[str, object]:
    """What keys show of the modules that layers were built of; empty where they do not."""
    if model.names.family is None:
        return {}
    understood = (model.names.understood(key) for key in model.tensors.model)
    shown = modules_shown(model.names.family, {own.whole: own.template for own in understood}, renamed=True)
    if shown or is_recorded(common.arguments.raw):
        return shown
    return modules_keeping([key.name for key, value in objects.others.items() if is_empty(value)])


def _sorted_out(dcp: Dcp) -> _Tensors:
    stored = dcp.tensors(dcp.metadata.tensors)
    found = _Tensors()
    others = {}
    for key, tensor in stored.items():
        if not key.startswith(_OPTIMIZER):
            others[key] = tensor
        elif (state := parse_state_key(key)) is not None:
            found.states[state] = tensor
        elif (bucket := parse_bucket_key(key)) is not None:
            found.buckets[bucket] = tensor
        else:
            others[key] = tensor
    found.prefix = next((own for own in _PREFIXES if others and all(key.startswith(own) for key in others)), "")
    found.model = {key.removeprefix(found.prefix): tensor for key, tensor in others.items()}
    stray = [key for key in found.model if key.startswith(_OPTIMIZER)]
    if stray:
        raise UnsupportedError(
            f"{counted(len(stray), 'tensor')} "
            f"of the optimizer in {dcp.folder}: of a layout that is not known:\n{listed(stray)}"
        )
    if not found.model:
        raise MalformedError(
            f"expected tensors of a model in {dcp.folder}; {METADATA} lists {counted(len(stored), 'tensor')}, none"
        )
    return found


def _states(dcp: Dcp, objects: SavedObjects, common: CommonState, model: _Model) -> DistStates:
    """Optimizer states, by the layout that the keys show."""
    tensors = model.tensors
    found = DistStates(layout="")
    if tensors.states:
        states = _without(tensors.prefix, tensors.states)
        found = from_state_keys(states, model.weights, model.names.understood, _original_shapes(dcp).get)
    buckets = stored_buckets(tensors.buckets) or gathered_buckets(objects.groups)
    if not buckets:
        return found
    usual = "dp_reshardable" if tensors.buckets else "dp_zero_gather_scatter"
    rest = {name: whole for name, whole in model.weights.items() if name not in found.fragments}
    placed = place_buckets(buckets, rest, model.names.orders(rest), _grid(common, model))
    return found.joined(from_buckets(placed, common.sharding or usual))


def _without(prefix: str, states: dict[StateKey, StoredTensor]) -> dict[StateKey, StoredTensor]:
    if not prefix:
        return states
    return {key._replace(model=key.model.removeprefix(prefix)): tensor for key, tensor in states.items()}


def _check_states(states: DistStates, model: _Model, arguments: Mapping[str, object], where: str) -> None:
    """Prove that no parameter lacks a state that others have, and that the model's own tensors are whole copies."""
    held = {name: frozenset(own) for name, own in states.fragments.items()}
    bare = {name for name in held if model.weights[name].dtype.itemsize >= DType.FLOAT32.itemsize}
    optimizers = {
        name: (states.chains.get(name), is_by_named_optimizer(arguments, name, model.weights[name].shape))
        for name in held
    }
    check_gaps(held, optimizers, where, without_master=bare)
    check_tiled((model.weights[name] for name, own in held.items() if WEIGHT in own), where)


def _grid(common: CommonState, model: _Model) -> Grid:
    """Degrees of the run; the chunks of the embedding tell the first, where arguments were not saved."""
    arguments = common.arguments
    embedding = model.weights.get(EMBEDDING)
    tp = arguments.tp or (1 if embedding is None else len(embedding.pieces))
    return Grid(tp=tp, expert_tp=arguments.etp or tp, ep=arguments.ep or 1)


def _original_shapes(dcp: Dcp) -> dict[str, tuple[int, ...]]:
    """Key to its shape before it was flattened to be saved (`mcore_data`, megatron-core up to 0.15)."""
    saved = dcp.metadata.facts.get("mcore_data")
    found = {}
    for key, own in saved.items() if isinstance(saved, dict) else ():
        shape = own.get(_REFORMULATED) if isinstance(own, dict) else None
        if isinstance(key, str) and isinstance(shape, tuple):
            found[key] = tuple(int(n) for n in shape)
    return found


def _files(dcp: Dcp, common: CommonState) -> Iterator[SourceFile]:
    roles = {dcp.path(METADATA): "index of all items"}
    if common.file:
        roles[common.file] = "common state"
    backend = dcp.path(BACKEND)
    if path_of(backend).is_file():
        roles[backend] = "backend and its version"
    roles |= {dcp.path(file): "tensors and objects" for file in dcp.files}
    for path, role in roles.items():
        yield source_file(path, role)


def _layout_notes(states: DistStates, common: CommonState) -> Iterator[str]:
    if not states.layout:
        yield "saved without an optimizer: every parameter counts as trained"
        return
    recorded = "" if common.sharding in (None, states.layout) else f" (recorded: {common.sharding})"
    yield f"optimizer states laid out as {states.layout}{recorded} in the source"
