"""torch_dist checkpoints of megatron-core, read as an index.

1. Read `.metadata`, the objects and the common state; sort the keys by what they are (`keys`).
2. Take the model's tensors apart into parameters, and name them by their family (`unstack`, `keys`).
3. Find the optimizer's states, in whichever of the six layouts (`states`, `buckets`).
4. Assign the parameters to their groups; put everything together. The rest becomes extras (`common`).

Groups and steps stand in the common state, or, where states cannot be laid out anew (`dp_reshardable` and its like), in
an object per data-parallel group; those of all groups of one optimizer are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ucp.contract.locating import Located
from ucp.contract.protocols import SourceOptions
from ucp.contract.ranks import Checksums
from ucp.core.index import (
    STEP,
    WEIGHT,
    AtomIndex,
    Extra,
    Fragment,
    Index,
    Kind,
    LostStates,
    ParamGroup,
    SourceFile,
    StateIndex,
)
from ucp.core.layout import Layout
from ucp.core.tensor import DType, Record
from ucp.core.union import Union, state_from_scalar
from ucp.errors import MalformedError, UnsupportedError, counted, listed
from ucp.io.dcp.checkpoint import Dcp, StoredTensor
from ucp.io.dcp.metadata import METADATA
from ucp.io.folder import absolute, path_of
from ucp.io.identity import source_file
from ucp.io.pickle.fields import mapping
from ucp_formats.megatron.arguments import check_gaps, check_recorded
from ucp_formats.megatron.groups import SavedGroup, assign_groups, drop_rank_settings, is_by_named_optimizer
from ucp_formats.megatron.modules import find_modules, find_modules_by_state, is_recorded, with_modules
from ucp_formats.megatron.names import EMBEDDING, MODULES, OUTPUT, SavedAs, parse_iteration
from ucp_formats.megatron.names import METADATA as BACKEND
from ucp_formats.megatron.torch_dist.buckets import ParallelDegrees, from_stored_tensors, place_buckets
from ucp_formats.megatron.torch_dist.keys import (
    BucketKey,
    DistNames,
    StateKey,
    name_tensors,
    parse_bucket_key,
    parse_state_key,
)
from ucp_formats.megatron.torch_dist.objects import (
    CommonState,
    SavedObjects,
    collect_extras,
    is_empty,
    optimizer_dicts,
    read_common,
    read_folder,
    read_objects,
    to_list,
)
from ucp_formats.megatron.torch_dist.placement import place_params
from ucp_formats.megatron.torch_dist.shifted import check_masters
from ucp_formats.megatron.torch_dist.states import (
    DistStates,
    from_buckets,
    from_gathered_objects,
    from_state_keys,
    state_dtype,
)
from ucp_formats.megatron.torch_dist.unstack import GlobalTensor, check_tiled, unstack


@dataclass(slots=True, kw_only=True)
class DistGroups:
    """Groups and steps."""

    groups: tuple[ParamGroup, ...] = ()
    """Groups with the names of their parameters."""
    steps: dict[str, StateIndex] = field(default_factory=dict)
    """Parameter to its step."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""
    dropped: list[str] = field(default_factory=list)
    """What is not known, and of which parameters."""
    lost: dict[str, LostStates] = field(default_factory=dict)
    """Parameters whose group is not known, and why."""


def read_groups(
    common: CommonState,
    objects: SavedObjects,
    shapes: Mapping[str, tuple[int, ...]],
    chains: Mapping[str, int | None],
    arguments: Mapping[str, object],
) -> DistGroups:
    """Groups of the trained parameters `shapes` (in the order of registration), and their steps.

    `chains`: which of several optimizers a parameter is in, where that is known. `arguments`: of the run.
    """
    found = DistGroups()
    saved = list(_saved_groups(common, objects, found))
    if not saved or not shapes:
        return found
    dealt = assign_groups(saved, shapes, arguments, chains)
    found.notes.append(dealt.note)
    found.dropped += dealt.dropped
    found.lost |= dealt.lost
    shared = _common_step(common)
    for group in dealt.groups:
        step = state_from_scalar(group.hyper.get(STEP)) or shared
        if step is not None:
            found.steps |= dict.fromkeys(group.params, step)
    agreed = shared or state_from_scalar(dealt.step)
    if agreed is not None:
        found.steps |= dict.fromkeys(dealt.lost, agreed)
    found.groups = tuple(drop_rank_settings(group, found.steps) for group in dealt.groups)
    if not found.steps:
        found.notes.append("no step is recorded")
    return found


def _saved_groups(common: CommonState, objects: SavedObjects, found: DistGroups) -> Iterator[SavedGroup]:
    """Groups as saved: of the common state, else of the first data-parallel group, for every optimizer."""
    inner = {chain: own.get("optimizer") for chain, own in optimizer_dicts(common.values).items()}
    where = common.where
    inner = {chain: own for chain, own in inner.items() if isinstance(own, dict) and "param_groups" in own}
    apart = {chain: own for chain, own in _of_data_parallel_groups(objects, found).items() if chain not in inner}
    if apart:
        where = f"{where}, or of an object 'optimizer' of a data-parallel group"
    for chain, own in sorted({**inner, **apart}.items(), key=lambda item: item[0] or 0):
        groups = own.get("param_groups") if isinstance(own, dict) else None
        for group in to_list(groups, f"param_groups of {where}") if groups is not None else ():
            entries = mapping(group, f"a group of {where}")
            hyper = {str(key): value for key, value in entries.items() if key not in ("params", "param_names")}
            yield SavedGroup(chain=chain, hyper=hyper)


def _of_data_parallel_groups(objects: SavedObjects, found: DistGroups) -> dict[int | None, object]:
    first: dict[int | None, object] = {}
    checksums = Checksums(objects.records)
    for key, value in sorted(objects.groups.items(), key=lambda item: (item[0].chain or 0, item[0].group)):
        if key.kind != "optimizer":
            continue
        usual = first.setdefault(key.chain, value)
        if not checksums.is_same(value, usual):
            found.notes.append(f"parameter groups of data-parallel group {key.group} differ from the first one's")
    return first


def _common_step(common: CommonState) -> StateIndex | None:
    """A step that all parameters share: `common_step`, or that of the first parameter (megatron-core up to 0.15)."""
    for own in optimizer_dicts(common.values).values():
        inner = own.get("optimizer")
        state = inner.get("state") if isinstance(inner, dict) else None
        if isinstance(state, dict) and "common_step" in state:
            return state_from_scalar(state["common_step"])
        params = own.get("param_state")
        for param in params.values() if isinstance(params, dict) else ():
            if isinstance(param, dict) and STEP in param:
                return state_from_scalar(param[STEP])
    return None


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
    weights: dict[str, GlobalTensor]
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
    laid = place_params(model.weights, model.names, common, states)
    atoms = {own: _atom(it, states, groups, model.names, laid.get(own)) for own, it in model.weights.items()}
    is_tied = EMBEDDING in atoms and OUTPUT not in atoms and not common.arguments.untied
    recorded = "" if common.sharding in (None, states.layout) else f" (recorded: {common.sharding})"
    checked = check_masters(atoms, layout=states.layout, tied=is_tied)
    return Index(
        path=dcp.folder,
        format=name,
        evidence=located.reasons,
        producer="Megatron (torch_dist), version not recorded",
        topology=common.arguments.topology(),
        step=parse_iteration(located.root.name) if common.iteration is None else common.iteration,
        atoms=checked.atoms,
        groups=groups.groups,
        aliases={OUTPUT: EMBEDDING} if is_tied else {},
        extras=(*collect_extras(common, objects), *([Extra(name=MODULES, value=dict(modules))] if modules else [])),
        files=tuple(_files(dcp, common)),
        records=(*common.records, *objects.records, *model.tensors.records),
        notes=(
            *located.notes,
            *model.names.notes,
            f"optimizer states laid out as {states.layout}{recorded} in the source"
            if states.layout
            else "saved without an optimizer: every parameter counts as trained",
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
    names = name_tensors(shapes, common.arguments.raw, options)
    weights = unstack(tensors.model.items(), names.parse, lambda _: None)
    if names.family is not None:
        wholes = {own: whole.shape for own, whole in weights.items()}
        check_recorded(names.family, common.arguments.raw, wholes, where, pads_on_load=True)
    return _Model(tensors, names, {own: weights[own] for own in names.sort(weights)})


def _modules(model: _Model, common: CommonState, objects: SavedObjects) -> Mapping[str, object]:
    """What keys show of the modules that layers were built of; empty where they do not."""
    if model.names.family is None:
        return {}
    understood = (model.names.parse(key) for key in model.tensors.model)
    shown = find_modules(model.names.family, {own.full_key: own.template for own in understood}, renamed=True)
    if shown or is_recorded(common.arguments.raw):
        return shown
    return find_modules_by_state([key.name for key, value in objects.others.items() if is_empty(value)])


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
        prefix = tensors.prefix
        states = {key._replace(model=key.model.removeprefix(prefix)): own for key, own in tensors.states.items()}
        saved = dcp.metadata.facts.get("mcore_data")  # shapes before they were flattened (megatron-core up to 0.15)
        shapes: dict[str, tuple[int, ...]] = {}
        for key, own in saved.items() if isinstance(saved, dict) else ():
            shape = own.get(_REFORMULATED) if isinstance(own, dict) else None
            if isinstance(key, str) and isinstance(shape, tuple):
                shapes[key] = tuple(int(n) for n in shape)
        found = from_state_keys(states, model.weights, model.names.parse, shapes.get)
    buckets = from_stored_tensors(tensors.buckets) or from_gathered_objects(objects.groups)
    if not buckets:
        return found
    usual = "dp_reshardable" if tensors.buckets else "dp_zero_gather_scatter"
    rest = {name: whole for name, whole in model.weights.items() if name not in found.fragments}
    arguments, embedding = common.arguments, model.weights.get(EMBEDDING)
    # where arguments were not saved, the chunks of the embedding tell
    tp = arguments.tp or (1 if embedding is None else len(embedding.boxes))
    grid = ParallelDegrees(tp=tp, expert_tp=arguments.etp or tp, ep=arguments.ep or 1)
    placed = place_buckets(buckets, rest, model.names.registration_orders(rest), grid)
    return found.merge(from_buckets(placed, common.sharding or usual))


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


def _atom(whole: GlobalTensor, states: DistStates, groups: DistGroups, names: DistNames, layout: Layout) -> AtomIndex:
    """The atom of one parameter or buffer: the master is its weight where there is one."""
    made = {
        key: StateIndex(dtype=state_dtype(pieces), global_shape=whole.shape, fragments=tuple(pieces))
        for key, pieces in states.fragments.get(whole.name, {}).items()
    }
    if whole.name in groups.steps and made.keys() - {WEIGHT}:
        made[STEP] = groups.steps[whole.name]
    pieces = tuple(Fragment(box=piece.box, ref=piece.ref) for piece in whole.boxes)
    model = StateIndex(dtype=whole.dtype, global_shape=whole.shape, fragments=pieces)
    kind = Kind.PARAMETER
    if whole.name not in states.fragments:
        is_buffer = names.is_buffer(whole.name)
        kind = Kind.BUFFER if is_buffer else Kind.FROZEN if states.fragments else Kind.PARAMETER
    return Union().build_atom(whole.name, kind=kind, layout=layout, states=made, model=model)
