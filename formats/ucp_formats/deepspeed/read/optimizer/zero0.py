"""Reads the optimizer without ZeRO, which is in the model-states file in one of three forms.

- a torch optimizer that steps the model's parameters: `state`, `param_groups`;
- FP16_UnfusedOptimizer: a torch optimizer that steps one master per parameter, in `fp32_groups`;
- FP16_Optimizer: a torch optimizer that steps one flat master per group, in `fp32_groups_flat`.

None of them names its parameters. The names come from the first of these sources that has them: `param_shapes`, which
ucp writes and DeepSpeed leaves None without ZeRO; torch's `param_names`; in the third form, the module's tensors, which
are views of one flat tensor per group. Otherwise order and shapes must allow only one assignment (`ucp.core.assign`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod

from ucp.contract.ranks import Checksums, Problems
from ucp.core.assign import FlatSlots, ManyWaysError, SlotGroup, Slots, possible_places
from ucp.core.index import STEP, WEIGHT, Extra, ParamGroup
from ucp.core.tensor import TensorRef
from ucp.core.union import ShardedTensor, StateSource, state_from_scalar
from ucp.errors import MalformedError, UnsupportedError, format_count, format_list
from ucp.io.pickle.fields import Shape, describe_value
from ucp_formats.deepspeed.experts import is_expert
from ucp_formats.deepspeed.extras import UNSTEPPED
from ucp_formats.deepspeed.partition import shared_buffers
from ucp_formats.deepspeed.read.optimizer.flat_group import FlatGroupStates, OptimizerPart, Shard, add_flat_group
from ucp_formats.deepspeed.read.optimizer.saved import SavedGroup, UnshardedOptimizer

_FLAT = "FP16_Optimizer"

Params = Mapping[str, TensorRef]
"""Tensors of the module that can be parameters, in the order of the model; tied ones appear once."""

Names = Sequence[Sequence[str]]
"""Parameter names of each group, in its order."""

INFERRED = (
    "the optimizer numbers its parameters without naming them: names are inferred from the order of the model and from "
    "shapes, which allow only one assignment"
)
"""Note to the user about inferred names."""


def read_optimizer(
    optimizer: UnshardedOptimizer,
    params: Params,
    checksums: Checksums,
    order: Names | None = None,
    *,
    stacked: Container[str] = (),
) -> OptimizerPart:
    """States and groups of an optimizer without ZeRO.

    `order`: parameter names of each group in its order, if the user states them; else they are found or inferred.
    `stacked`: parameters that are experts although their names do not tell.
    """
    part = OptimizerPart()
    groups = optimizer.torch.groups
    try:
        names = order if order is not None else _find_names(optimizer, params, stacked, checksums, part)
    except UnsupportedError:
        if optimizer.kind != "torch" or optimizer.torch.state:
            raise
        # there are no states or masters to assign, so names are not needed
        part.extras.append(Extra(name=UNSTEPPED, value=list(optimizer.torch.saved_groups)))
        part.notes = ["the optimizer never stepped and does not name its parameters: its groups are kept as an extra"]
        return part
    unknown = [name for members in names for name in members if name not in params]
    if unknown or len(names) != len(groups):
        raise MalformedError(
            f"expected names of the module's parameters for the {len(groups)} parameter groups of {optimizer.where}; "
            f"got {format_count(len(names), 'group')}"
            f"{' with names that the module does not have' if unknown else ''}\n{format_list(unknown)}"
        )
    problems = Problems()
    for number, (group, members) in enumerate(zip(groups, names, strict=True)):
        shapes = {name: params[name].shape for name in members}
        if optimizer.kind == _FLAT:
            add_flat_group(part, _flat_group(optimizer, number, shapes), checksums, problems)
        else:
            _add_slots(optimizer, number, shapes, part, problems)
        part.groups.append(ParamGroup(params=tuple(members), hyper=group.hyper))
    problems.raise_any(optimizer.where, "no ZeRO")
    part.take_group_steps()
    return part


def _flat_group(optimizer: UnshardedOptimizer, number: int, shapes: Mapping[str, Shape]) -> FlatGroupStates:
    """States of a group of FP16_Optimizer."""
    (flat,), (slot,) = optimizer.masters[number], optimizer.torch.groups[number].slots
    numels = {name: prod(shape) for name, shape in shapes.items()}
    where = f"fp32_groups_flat of {optimizer.where}"
    return FlatGroupStates(
        label=f"group {number}",
        shapes=shapes,
        layouts=shared_buffers(numels, ranks=1, paddings=None, first=flat.numel, known_from=where),
        shards=(Shard(rank=0, file=optimizer.where, weight=flat, states=optimizer.torch.state.get(slot, {})),),
    )


def _find_names(
    optimizer: UnshardedOptimizer, params: Params, stacked: Container[str], checksums: Checksums, part: OptimizerPart
) -> Names:
    """Parameter names of each group, from the first source in the module docstring that has them."""
    if optimizer.recorded:  # in `param_shapes`, which ucp writes
        wrong = [
            f"{name}: {list(shape)} in param_shapes, {list(params[name].shape)} in module"
            for group in optimizer.recorded
            for name, shape in group.items()
            if name in params and params[name].shape != shape
        ]
        if wrong:
            raise MalformedError(
                f"expected param_shapes of {optimizer.where} to have the shapes of the module; "
                f"got\n{format_list(wrong)}\nThe file was changed after it was saved: use an unchanged copy, or set "
                "param_shapes to None"
            )
        return [tuple(group) for group in optimizer.recorded]
    named = [
        group.names  # in FP16_Optimizer, several names for one slot
        for group in optimizer.torch.groups
        if group.names is not None
        and (optimizer.kind == _FLAT or len(group.names) == len(group.slots))
        and all(name in params for name in group.names)
    ]
    if len(named) == len(optimizer.torch.groups):
        return named
    by_storage = _find_names_by_storage(optimizer, params, checksums) if optimizer.kind == _FLAT else None
    if by_storage is not None:
        return by_storage
    part.notes.append(INFERRED)
    return _infer_names(optimizer, params, stacked)


def _find_names_by_storage(optimizer: UnshardedOptimizer, params: Params, checksums: Checksums) -> Names | None:
    """Parameter names of each group, from the flat tensors of which the module's tensors are views.

    FP16_Optimizer makes every parameter of a group a view of one unpadded tensor (fused_optimizer.py, 0.19.8). None if
    the module's tensors are not such views, or if the length of a master fits several flat tensors.
    """
    views: dict[int, list[tuple[int, int, str, int]]] = {}
    for name, ref in params.items():
        storage = checksums.find_storage(ref) if ref.numel else None
        if storage is not None:
            start = (ref.offset - storage.offset) // ref.dtype.itemsize
            length = storage.nbytes // ref.dtype.itemsize
            views.setdefault(storage.offset, []).append((start, start + ref.numel, name, length))
    flats: dict[int, list[tuple[str, ...]]] = {}
    for ranges in views.values():
        ranges.sort()
        edges = [0, *(stop for _, stop, _, _ in ranges)]
        if all(start == edge for (start, *_), edge in zip(ranges, edges, strict=False)) and edges[-1] == ranges[0][3]:
            flats.setdefault(edges[-1], []).append(tuple(name for _, _, name, _ in ranges))
    lengths = [flat.numel for (flat,) in optimizer.masters]
    groups = []
    for length in lengths:
        candidates = flats.get(length, [])
        several = [names for names in candidates if len(names) > 1]  # surely a flat tensor, not a single parameter
        groups += (several or candidates) if len(several or candidates) == 1 else []
    return groups if len(groups) == len(set(lengths)) == len(lengths) else None


def _infer_names(optimizer: UnshardedOptimizer, params: Params, stacked: Container[str]) -> Names:
    """Parameter names of each group, inferred from shapes; groups marked `moe` hold only experts, others hold none."""
    slots = slots_of(optimizer)
    has_experts = [group.has_experts for group in optimizer.torch.groups]
    if not any(has_experts):
        return names_by_shape([slots], [params], optimizer.where)[0]
    names_by_group: dict[int, tuple[str, ...]] = {}
    for kind in (False, True):
        numbers = [number for number, marked in enumerate(has_experts) if marked is kind]
        candidates = {name: ref for name, ref in params.items() if (is_expert(name) or name in stacked) is kind}
        (names,) = names_by_shape([[slots[number] for number in numbers]], [candidates], optimizer.where)
        names_by_group.update(zip(numbers, names, strict=True))
    return [names_by_group[number] for number in range(len(slots))]


def names_by_shape(
    slots: Sequence[Sequence[SlotGroup]], layers: Sequence[Params], where: str
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Parameter names of each group, for one optimizer or for the optimizers of all pipeline stages.

    `slots`: what each optimizer steps, group by group. Raises UnsupportedError if no assignment or several fit.
    """
    params = [name for layer in layers for name in layer]
    try:
        places = possible_places(slots, [[ref.shape for ref in layer.values()] for layer in layers])
        unclear = [] if places is None else [n for n, options in zip(params, places, strict=True) if len(options) > 1]
    except ManyWaysError:
        places, unclear = [], params
    if places is None:
        raise UnsupportedError(
            "no assignment of the module's parameters, in their order, to the "
            f"{format_count(sum(map(len, slots)), 'parameter group')} of {where} fits the shapes of the optimizer "
            f"states. {REMEDY}"
        )
    if unclear:
        raise UnsupportedError(
            f"the optimizer in {where} does not name its parameters, and more than one assignment fits its shapes; it "
            f"is not known which of its states belong to these:\n{format_list(unclear)}\n{REMEDY}"
        )
    members: list[list[str]] = [[] for groups in slots for _ in groups]
    for name, (place,) in zip(params, places, strict=True):
        if place is not None:
            members[place[0]].append(name)
    names = iter(map(tuple, members))
    return tuple(tuple(next(names) for _ in groups) for groups in slots)


REMEDY = (
    "Save again with an optimizer built from model.named_parameters() (torch 2.6 or later keeps the names), or with "
    "ZeRO stage 1. Or copy each file that has an optimizer, and write the names of each group, in its order and with "
    "their shapes, into the copy: saved = torch.load(FILE); saved['param_shapes'] = [{name: SHAPES[name] for name in "
    "group} for group in GROUPS]; torch.save(saved, FILE)"
)
"""What a user can do if the names are not known."""


def slots_of(optimizer: UnshardedOptimizer) -> list[SlotGroup]:
    """Slots of each group, in the form that `possible_places` takes."""
    if optimizer.kind == _FLAT:
        return [FlatSlots(flat.numel) for (flat,) in optimizer.masters]
    if optimizer.masters:
        return [Slots(tuple(ref.shape for ref in masters)) for masters in optimizer.masters]
    state, groups = optimizer.torch.state, optimizer.torch.groups
    group_shapes: list[list[Shape | None]] = []
    for group in groups:  # the shape of each slot's states; None if they have no shape, or several
        group_shapes.append([])
        for slot in group.slots:
            tensors = (value for name, value in state.get(slot, {}).items() if name != STEP)
            shapes = {value.shape for value in tensors if isinstance(value, TensorRef)}
            if len(shapes) > 1:  # ignore one-element counts beside other states
                shapes = {shape for shape in shapes if prod(shape) != 1}
            group_shapes[-1].append(shapes.pop() if len(shapes) == 1 else None)
    if all(shape is None or prod(shape) == 1 for slots in group_shapes for shape in slots):  # only counts
        group_shapes = [[None] * len(slots) for slots in group_shapes]
    return [Slots(tuple(slots)) for slots in group_shapes]


def _add_slots(
    optimizer: UnshardedOptimizer, number: int, params: Mapping[str, Shape], part: OptimizerPart, problems: Problems
) -> None:
    """Add the states of a group that has one slot per parameter."""
    group = optimizer.torch.groups[number]
    masters = optimizer.masters[number] if optimizer.masters else ()
    if len(group.slots) != len(params) or (masters and len(masters) != len(params)):
        problems.wrong.append(
            f"group {number} has {format_count(len(group.slots), 'parameter')}; expected {len(params)}: "
            f"{', '.join(params)}"
        )
        return
    for at, (slot, (name, shape)) in enumerate(zip(group.slots, params.items(), strict=True)):
        saved = optimizer.torch.state.get(slot, {})
        unplaced = []
        states = part.states.setdefault(name, {})
        for key, value in ({WEIGHT: masters[at], **saved} if masters else saved).items():
            if isinstance(value, TensorRef) and value.shape == shape:
                state: StateSource | None = ShardedTensor.unsharded(value)
            else:
                state = state_from_scalar(value)
            if value is None:
                part.dropped.append(f"{name}: state {key} is None")
            elif state is not None:
                states[key] = state
            else:
                part.extras.append(Extra(name=f"optimizer_state/{name}/{key}", value=value))
                unplaced.append(f"{name}: state {key} is {describe_value(value)}")
        if unplaced:
            part.lose([name], unplaced)
    _share_fused_count(group, [part.states[name] for name in params], part)


def _share_fused_count(group: SavedGroup, states: Sequence[dict[str, StateSource]], part: OptimizerPart) -> None:
    """Give all parameters of a FusedAdam group the step of the last one, where FusedAdam counts (fused_adam.py)."""
    with_step = [param for param in states if STEP in param]
    steps = [param[STEP] for param in with_step]
    is_fused_adam = "bias_correction" in group.hyper and type(group.hyper.get(STEP)) is int
    if not is_fused_adam or len(steps) < 2 or steps[-1] == steps[0] or any(step != steps[0] for step in steps[:-1]):
        return
    for param in with_step:
        param[STEP] = steps[-1]
    part.notes.append("FusedAdam counts the steps of a group in its last parameter: all its parameters get that step")
