"""torch_dist checkpoints of megatron-core, read as an index.

1. Read `.metadata`, the objects and the common state; sort the keys by kind (`keys`, `objects`).
2. Unstack the model's tensors into parameters, and name them by their family (`unstack`, `keys`).
3. Find the optimizer's states, in any of the six layouts (`states`, `buckets`).
4. Assign the parameters to their groups; put everything together. The rest becomes extras (`objects`).

Parameter groups and steps are in the common state. In layouts that fit only the model-parallel topology they were saved
with (`dp_reshardable` and similar ones), every data-parallel group saves them in an object; the objects of one
optimizer are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ucp.contract.locating import Located
from ucp.contract.protocols import SourceOptions
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
from ucp.errors import MalformedError, UnsupportedError, format_count, format_list
from ucp.io.dcp.checkpoint import Dcp, StoredTensor
from ucp.io.dcp.metadata import METADATA
from ucp.io.folder import path_of, to_absolute
from ucp.io.pickle.fields import require_mapping
from ucp.io.provenance import source_file
from ucp_formats.megatron.arguments import check_gaps, check_recorded
from ucp_formats.megatron.groups import SavedGroup, assign_groups, drop_rank_settings, is_by_named_optimizer
from ucp_formats.megatron.modules import find_modules, find_modules_by_state, is_recorded, with_modules
from ucp_formats.megatron.names import EMBEDDING, MODULES, OUTPUT, SavedAs, parse_iteration
from ucp_formats.megatron.names import METADATA as BACKEND
from ucp_formats.megatron.torch_dist.buckets import (
    ParallelDegrees,
    from_gathered_objects,
    from_stored_tensors,
    place_buckets,
)
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
    list_optimizers,
    read_common,
    read_folder,
    read_objects,
    to_list,
)
from ucp_formats.megatron.torch_dist.placement import place_params
from ucp_formats.megatron.torch_dist.shifted import check_masters
from ucp_formats.megatron.torch_dist.states import (
    DistStates,
    from_state_keys,
    state_dtype,
)
from ucp_formats.megatron.torch_dist.unstack import GlobalTensor, check_tiled, unstack


@dataclass(frozen=True, slots=True, kw_only=True)
class DistGroups:
    """Parameter groups and steps."""

    groups: tuple[ParamGroup, ...] = ()
    """Groups with the names of their parameters."""
    steps: Mapping[str, StateIndex] = field(default_factory=dict)
    """Parameter to its step."""
    notes: Sequence[str] = ()
    """What was inferred."""
    dropped: tuple[str, ...] = ()
    """What is unknown, and for which parameters."""
    lost: Mapping[str, LostStates] = field(default_factory=dict)
    """Parameters whose group is unknown, and why."""


def read_groups(
    common: CommonState,
    objects: SavedObjects,
    shapes: Mapping[str, tuple[int, ...]],
    chains: Mapping[str, int | None],
    arguments: Mapping[str, object],
) -> DistGroups:
    """Groups of the trained parameters `shapes` (in the order of registration), and their steps.

    `chains`: parameter to the number of its optimizer in a chain, if known. `arguments`: of the run.
    """
    notes: list[str] = []
    saved = list(_saved_groups(common, objects, notes))
    if not saved or not shapes:
        return DistGroups(notes=notes)
    assigned = assign_groups(saved, shapes, arguments, chains)
    notes.append(assigned.note)
    common_step = _common_step(common)
    steps: dict[str, StateIndex] = {}
    for group in assigned.groups:
        step = state_from_scalar(group.hyper.get(STEP)) or common_step
        if step is not None:
            steps |= dict.fromkeys(group.params, step)
    step = common_step or state_from_scalar(assigned.step)
    if step is not None:
        steps |= dict.fromkeys(assigned.lost, step)
    if not steps:
        notes.append("the steps of the optimizer are not recorded")
    groups = tuple(drop_rank_settings(group, steps) for group in assigned.groups)
    return DistGroups(groups=groups, steps=steps, notes=notes, dropped=assigned.dropped, lost=assigned.lost)


def _saved_groups(common: CommonState, objects: SavedObjects, notes: list[str]) -> Iterator[SavedGroup]:
    """Groups of every optimizer, from the common state or else from the first data-parallel group."""
    optimizers: dict[int | None, object] = {}
    for key, value, is_first in objects.distinct_groups(lambda kind: kind == "optimizer"):
        if is_first:
            optimizers[key.chain] = value
        else:
            notes.append(
                f"parameter groups of data-parallel group {key.group} differ from those of the first, which are used"
            )
    in_common = {chain: optimizer.get("optimizer") for chain, optimizer in list_optimizers(common.values).items()}
    in_common = {
        chain: inner for chain, inner in in_common.items() if isinstance(inner, dict) and "param_groups" in inner
    }
    of_groups = {chain: value for chain, value in optimizers.items() if chain not in in_common}
    where = f"{common.where}, or of the object 'optimizer' of a data-parallel group" if of_groups else common.where
    for chain, optimizer in sorted({**in_common, **of_groups}.items(), key=lambda item: item[0] or 0):
        groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
        for group in to_list(groups, f"param_groups of {where}") if groups is not None else ():
            entries = require_mapping(group, f"a group of {where}")
            hyper = {str(key): value for key, value in entries.items() if key not in ("params", "param_names")}
            yield SavedGroup(chain=chain, hyper=hyper)


def _common_step(common: CommonState) -> StateIndex | None:
    """A step that all parameters share: `common_step`, or that of the first parameter (megatron-core up to 0.15)."""
    for optimizer in list_optimizers(common.values).values():
        inner = optimizer.get("optimizer")
        state = inner.get("state") if isinstance(inner, dict) else None
        if isinstance(state, dict) and "common_step" in state:
            return state_from_scalar(state["common_step"])
        params = optimizer.get("param_state")
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
    """Stored tensors, by the kind of their keys."""

    model: dict[str, StoredTensor] = field(default_factory=dict)
    states: dict[StateKey, StoredTensor] = field(default_factory=dict)
    buckets: dict[BucketKey, StoredTensor] = field(default_factory=dict)

    @property
    def records(self) -> Iterator[Record]:
        """Checksums of all chunks."""
        for tensor in (*self.model.values(), *self.states.values(), *self.buckets.values()):
            yield from tensor.records


@dataclass(frozen=True, slots=True)
class _Model:
    """The model's tensors, unstacked."""

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
    dcp = read_folder(to_absolute(located.root))
    objects = read_objects(dcp)
    common = read_common(dcp, objects)
    arguments = common.arguments
    model = _read_model(_sort_tensors(dcp), arguments.raw, options, dcp.folder)
    states = _read_states(dcp, objects, common, model)
    _check_states(states, model, arguments.raw, dcp.folder)
    trained = {param: tensor.shape for param, tensor in model.weights.items() if param in states.fragments}
    modules = _find_modules(model, arguments.raw, objects)
    groups = read_groups(common, objects, trained, states.chains, with_modules(arguments.raw, modules))
    layouts = place_params(model.weights, model.names, common, states)
    atoms = {
        param: _make_atom(tensor, states, groups, model.names, layouts.get(param))
        for param, tensor in model.weights.items()
    }
    is_tied = EMBEDDING in atoms and OUTPUT not in atoms and not arguments.has_output_weight
    recorded = "" if common.sharding in (None, states.layout) else f" (recorded: {common.sharding})"
    checked = check_masters(atoms, layout=states.layout, tied=is_tied)
    return Index(
        path=dcp.folder,
        format=name,
        evidence=located.reasons,
        producer="Megatron (torch_dist), version not recorded",
        topology=arguments.topology(),
        step=parse_iteration(located.root.name) if common.iteration is None else common.iteration,
        atoms=checked.atoms,
        groups=groups.groups,
        aliases={OUTPUT: EMBEDDING} if is_tied else {},
        extras=(*collect_extras(common, objects), *([Extra(name=MODULES, value=dict(modules))] if modules else [])),
        files=tuple(_list_files(dcp, common)),
        records=(*common.records, *objects.records, *model.tensors.records),
        notes=(
            *located.notes,
            *model.names.notes,
            f"the layout of the optimizer states in the source is {states.layout}{recorded}"
            if states.layout
            else "saved without an optimizer: every parameter counts as trained",
            *states.notes,
            *groups.notes,
            *checked.notes,
            *layouts.notes,
        ),
        doubts=layouts.contradictions,
        dropped=(*checked.dropped, *groups.dropped),
        lost={**groups.lost, **checked.lost},
    )


def _sort_tensors(dcp: Dcp) -> _Tensors:
    stored = dcp.tensors(dcp.metadata.tensors)
    tensors = _Tensors()
    for key, tensor in stored.items():
        if not key.startswith(_OPTIMIZER):
            tensors.model[key] = tensor
        elif (state := parse_state_key(key)) is not None:
            tensors.states[state] = tensor
        elif (bucket := parse_bucket_key(key)) is not None:
            tensors.buckets[bucket] = tensor
        else:
            tensors.model[key] = tensor
    prefix = next(
        (text for text in _PREFIXES if tensors.model and all(key.startswith(text) for key in tensors.model)), ""
    )
    tensors.model = {key.removeprefix(prefix): tensor for key, tensor in tensors.model.items()}
    tensors.states = {
        key._replace(model=key.model.removeprefix(prefix)): tensor for key, tensor in tensors.states.items()
    }
    unknown = [key for key in tensors.model if key.startswith(_OPTIMIZER)]
    if unknown:
        raise UnsupportedError(
            f"the optimizer in {dcp.folder} has {format_count(len(unknown), 'tensor')} of an unknown layout:\n"
            f"{format_list(unknown)}"
        )
    if not tensors.model:
        raise MalformedError(
            f"expected tensors of a model in {dcp.folder}; {METADATA} lists {format_count(len(stored), 'tensor')}, "
            "none of a model"
        )
    return tensors


def _read_model(tensors: _Tensors, arguments: Mapping[str, object], options: SourceOptions, where: str) -> _Model:
    names = name_tensors({key: tensor.saved.shape for key, tensor in tensors.model.items()}, arguments, options)
    weights = unstack(tensors.model.items(), names.parse, lambda _: None)
    if names.family is not None:
        shapes = {param: tensor.shape for param, tensor in weights.items()}
        check_recorded(names.family, arguments, shapes, where, pads_on_load=True)
    return _Model(tensors, names, {param: weights[param] for param in names.sort(weights)})


def _find_modules(model: _Model, arguments: Mapping[str, object], objects: SavedObjects) -> Mapping[str, object]:
    """Modules that layers were built from, as the keys show; empty if they do not."""
    if model.names.family is None:
        return {}
    keys = (model.names.parse(key) for key in model.tensors.model)
    modules = find_modules(model.names.family, {key.full_key: key.template for key in keys}, renamed=True)
    if modules or is_recorded(arguments):
        return modules
    return find_modules_by_state([key.name for key, value in objects.others.items() if is_empty(value)])


def _read_states(dcp: Dcp, objects: SavedObjects, common: CommonState, model: _Model) -> DistStates:
    """Optimizer states, by the layout that the keys show."""
    tensors = model.tensors
    states = DistStates(layout="")
    if tensors.states:
        saved = dcp.metadata.facts.get("mcore_data")  # shapes before they were flattened (megatron-core up to 0.15)
        shapes: dict[str, tuple[int, ...]] = {}
        for key, facts in saved.items() if isinstance(saved, dict) else ():
            shape = facts.get(_REFORMULATED) if isinstance(facts, dict) else None
            if isinstance(key, str) and isinstance(shape, tuple):
                shapes[key] = tuple(int(n) for n in shape)
        states = from_state_keys(tensors.states, model.weights, model.names.parse, shapes.get)
    buckets = from_stored_tensors(tensors.buckets) or from_gathered_objects(objects.groups)
    if not buckets:
        return states
    layout = common.sharding or ("dp_reshardable" if tensors.buckets else "dp_zero_gather_scatter")
    weights = {name: tensor for name, tensor in model.weights.items() if name not in states.fragments}
    arguments, embedding = common.arguments, model.weights.get(EMBEDDING)
    # if arguments were not saved, the number of chunks of the embedding shows tp
    tp = arguments.tp or (1 if embedding is None else len(embedding.boxes))
    degrees = ParallelDegrees(tp=tp, expert_tp=arguments.etp or tp, ep=arguments.ep or 1)
    orders = model.names.registration_orders(weights)
    return states.merge(place_buckets(buckets, weights, orders, degrees, layout=layout))


def _check_states(states: DistStates, model: _Model, arguments: Mapping[str, object], where: str) -> None:
    """Check that no parameter lacks a state that others have, and that the model's own tensors are full copies."""
    names = {name: frozenset(by_state) for name, by_state in states.fragments.items()}
    weights = {name: model.weights[name] for name in names}
    optimizers = {
        name: (states.chains.get(name), is_by_named_optimizer(arguments, name, weight.shape))
        for name, weight in weights.items()
    }
    without_master = {name for name, weight in weights.items() if weight.dtype.itemsize >= DType.FLOAT32.itemsize}
    check_gaps(names, optimizers, where, without_master=without_master)
    check_tiled((weight for name, weight in weights.items() if WEIGHT in names[name]), where)


def _list_files(dcp: Dcp, common: CommonState) -> Iterator[SourceFile]:
    roles = {dcp.path(METADATA): "index of all items"}
    if common.file:
        roles[common.file] = "common state"
    backend = dcp.path(BACKEND)
    if path_of(backend).is_file():
        roles[backend] = "backend and its version"
    roles |= {dcp.path(file): "tensors and objects" for file in dcp.files}
    for path, role in roles.items():
        yield source_file(path, role)


def _make_atom(
    tensor: GlobalTensor, states: DistStates, groups: DistGroups, names: DistNames, layout: Layout
) -> AtomIndex:
    """The atom of one parameter or buffer: its weight is the master, if there is one."""
    name, shape = tensor.name, tensor.shape
    by_state = {
        state: StateIndex(dtype=state_dtype(fragments), global_shape=shape, fragments=tuple(fragments))
        for state, fragments in states.fragments.get(name, {}).items()
    }
    if name in groups.steps and by_state.keys() - {WEIGHT}:
        by_state[STEP] = groups.steps[name]
    fragments = tuple(Fragment(box=box, ref=ref) for box, ref in tensor.boxes)
    model = StateIndex(dtype=tensor.dtype, global_shape=shape, fragments=fragments)
    kind = Kind.PARAMETER
    if name not in states.fragments:
        kind = Kind.BUFFER if names.is_buffer(name) else Kind.FROZEN if states.fragments else Kind.PARAMETER
    return Union().build_atom(name, kind=kind, layout=layout, states=by_state, model=model)
