"""The optimizer without ZeRO, which lies inside the model-states file, in one of three shapes.

- a torch optimizer over the model's own parameters: `state`, `param_groups`;
- FP16_UnfusedOptimizer: the same over a master per parameter, in `fp32_groups`;
- FP16_Optimizer: the same over one flat master per group, in `fp32_groups_flat`.

None of them has names. Files that ucp wrote have them in `param_shapes`, which DeepSpeed leaves None without ZeRO. Else
torch's own `param_names` tell where they are there; in the third shape, the module's tensors do, as views of a flat
tensor per group; else order and shapes must leave one answer (`ucp.core.assign`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ucp.contract.ranks import Checksums, Problems
from ucp.core.assign import FlatSlots, ManyWaysError, SlotGroup, Slots, possible_places
from ucp.core.index import STEP, WEIGHT, Extra, ParamGroup
from ucp.core.tensor import TensorRef
from ucp.core.union import ShardedTensor, StateSource, state_from_scalar
from ucp.errors import MalformedError, UnsupportedError, counted, listed
from ucp.io.pickle.fields import Shape, described
from ucp_formats.deepspeed.experts import is_expert
from ucp_formats.deepspeed.extras import UNSTEPPED
from ucp_formats.deepspeed.partition import shared_buffers
from ucp_formats.deepspeed.read.optimizer.flat_group import FlatGroupStates, OptimizerPart, Shard, add_flat_group
from ucp_formats.deepspeed.read.optimizer.saved import SavedGroup, UnshardedOptimizer

_FLAT = "FP16_Optimizer"

Params = Mapping[str, TensorRef]
"""Tensors of the module that can be parameters, in the order of the model; tied ones once."""

Names = Sequence[Sequence[str]]
"""Parameters of every group, in its order."""

INFERRED = (
    "the optimizer numbers its parameters without naming them: names are inferred from the order of the model and the "
    "shapes, which leave one answer"
)
"""What to tell where they are."""


def read_optimizer(
    optimizer: UnshardedOptimizer, params: Params, checksums: Checksums, order: Names | None = None
) -> OptimizerPart:
    """States and groups of an optimizer without ZeRO.

    `order`: names of every group in its order, when the user says so; else they are inferred.
    """
    part = OptimizerPart()
    groups = optimizer.torch.groups
    try:
        names = order if order is not None else _names(optimizer, params, checksums, part)
    except UnsupportedError:
        if optimizer.kind != "torch" or optimizer.torch.state:
            raise
        # without states and masters nothing is lost when it is not known which parameter is which
        part.extras.append(Extra(name=UNSTEPPED, value=list(optimizer.torch.saved_groups)))
        part.notes = ["the optimizer has never stepped and names no parameters: its groups are kept as an extra only"]
        return part
    unknown = [name for own in names for name in own if name not in params]
    if unknown or len(names) != len(groups):
        raise MalformedError(
            f"expected names of the module for the {len(groups)} parameter groups of {optimizer.where}; got "
            f"{counted(len(names), 'group')}{', with unknown names' if unknown else ''}\n{listed(unknown)}"
        )
    problems = Problems()
    for number, (group, own) in enumerate(zip(groups, names, strict=True)):
        if optimizer.kind == _FLAT:
            (flat,), (slot,) = optimizer.masters[number], group.slots
            numels = {name: params[name].numel for name in own}
            where = f"fp32_groups_flat of {optimizer.where}"
            states = optimizer.torch.state.get(slot, {})
            flat_group = FlatGroupStates(
                label=f"group {number}",
                shapes={name: params[name].shape for name in own},
                layouts=shared_buffers(numels, ranks=1, paddings=None, first=flat.numel, known_from=where),
                shards=(Shard(rank=0, file=optimizer.where, weight=flat, states=states),),
            )
            add_flat_group(part, flat_group, checksums, problems)
        else:
            _add_slots(optimizer, number, {name: params[name].shape for name in own}, part, problems)
        part.groups.append(ParamGroup(params=tuple(own), hyper=group.hyper))
    problems.raise_any(optimizer.where, "no ZeRO")
    part.take_group_steps()
    return part


def _names(optimizer: UnshardedOptimizer, params: Params, checksums: Checksums, part: OptimizerPart) -> Names:
    """Names of every group, from the best record there is."""
    if optimizer.recorded:  # in `param_shapes`, which ucp writes
        wrong = [
            f"{name}: {list(shape)} in param_shapes, {list(params[name].shape)} in module"
            for group in optimizer.recorded
            for name, shape in group.items()
            if name in params and params[name].shape != shape
        ]
        if wrong:
            raise MalformedError(
                f"expected the shapes of the module in param_shapes of {optimizer.where}; got\n{listed(wrong)}\nthe "
                "file was changed after it was saved: take an unchanged copy, or set param_shapes to None"
            )
        return [tuple(group) for group in optimizer.recorded]
    found: Names | None = [
        group.names  # of a flat tensor in FP16_Optimizer, however many they are
        for group in optimizer.torch.groups
        if group.names is not None
        and (optimizer.kind == _FLAT or len(group.names) == len(group.slots))
        and all(name in params for name in group.names)
    ]
    if found is not None and len(found) != len(optimizer.torch.groups):
        found = _by_storage(optimizer, params, checksums) if optimizer.kind == _FLAT else None
    if found is None:
        part.notes.append(INFERRED)
        found = _by_shape(optimizer, params)
    return found


def _by_storage(optimizer: UnshardedOptimizer, params: Params, checksums: Checksums) -> Names | None:
    """Names by the flat tensors that the module's are views of; None where they are not, or two are as long.

    FP16_Optimizer makes every parameter of a group a view of one unpadded tensor (fused_optimizer.py, 0.19.8).
    """
    views: dict[int, list[tuple[int, int, str, int]]] = {}
    for name, ref in params.items():
        storage = checksums.find_storage(ref) if ref.numel else None
        if storage is not None:
            start = (ref.offset - storage.offset) // ref.dtype.itemsize
            whole = storage.nbytes // ref.dtype.itemsize
            views.setdefault(storage.offset, []).append((start, start + ref.numel, name, whole))
    flats: dict[int, list[tuple[str, ...]]] = {}
    for own in views.values():
        own.sort()
        edges = [0, *(stop for _, stop, _, _ in own)]
        if all(start == edge for (start, *_), edge in zip(own, edges, strict=False)) and edges[-1] == own[0][3]:
            flats.setdefault(edges[-1], []).append(tuple(name for _, _, name, _ in own))
    lengths = [flat.numel for (flat,) in optimizer.masters]
    found = []
    for length in lengths:
        fitting = flats.get(length, [])
        several = [own for own in fitting if len(own) > 1]  # as only a group has
        found += (several or fitting) if len(several or fitting) == 1 else []
    return found if len(found) == len(set(lengths)) == len(lengths) else None


def _by_shape(optimizer: UnshardedOptimizer, params: Params) -> Names:
    """Names of every group; DeepSpeed keeps those of experts apart where it is asked to, and says `moe` of them."""
    slots = slots_of(optimizer)
    of_experts = [group.of_experts for group in optimizer.torch.groups]
    if not any(of_experts):
        return names_by_shape([slots], [params], optimizer.where)[0]
    found: dict[int, tuple[str, ...]] = {}
    for kind in (False, True):
        numbers = [number for number, own in enumerate(of_experts) if own is kind]
        alike = {name: ref for name, ref in params.items() if is_expert(name) is kind}
        (names,) = names_by_shape([[slots[number] for number in numbers]], [alike], optimizer.where)
        found.update(zip(numbers, names, strict=True))
    return [found[number] for number in range(len(slots))]


def names_by_shape(
    slots: Sequence[Sequence[SlotGroup]], layers: Sequence[Params], where: str
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Names of every group of an optimizer, or of that of each stage of a pipeline, by their `slots`.

    Raises UnsupportedError when none or several assignments fit.
    """
    params = [(name, ref.shape) for layer in layers for name, ref in layer.items()]
    try:
        places = possible_places(slots, [[ref.shape for ref in layer.values()] for layer in layers])
        unclear = [] if places is None else [n for (n, _), own in zip(params, places, strict=True) if len(own) > 1]
    except ManyWaysError:
        places, unclear = [], [name for name, _ in params]
    if places is None:
        raise UnsupportedError(
            "no assignment of the module's parameters, in their order, to the "
            f"{counted(sum(map(len, slots)), 'parameter group')} of {where} fits the shapes of the optimizer states. "
            f"{REMEDY}"
        )
    if unclear:
        raise UnsupportedError(
            f"the optimizer in {where} does not name its parameters, and more than one assignment fits; it is not "
            f"known to which group these belong:\n{listed(unclear)}\n{REMEDY}"
        )
    members: list[list[str]] = [[] for own in slots for _ in own]
    for (name, _), (place,) in zip(params, places, strict=True):
        if place is not None:
            members[place[0]].append(name)
    groups = iter(map(tuple, members))
    return tuple(tuple(next(groups) for _ in own) for own in slots)


REMEDY = (
    "Save again with an optimizer built from model.named_parameters() (torch 2.6 or later keeps the names), or with "
    "ZeRO stage 1. Or write the names of each group, in its order and with their shapes, into a copy of each file that "
    "has an optimizer: saved = torch.load(FILE); saved['param_shapes'] = [{name: SHAPES[name] for name in group} for "
    "group in GROUPS]; torch.save(saved, FILE)"
)
"""What to do where it is not known."""


def slots_of(optimizer: UnshardedOptimizer) -> list[SlotGroup]:
    """Slots of every group, as `possible_places` takes them."""
    if optimizer.kind == _FLAT:
        return [FlatSlots(flat.numel) for (flat,) in optimizer.masters]
    if optimizer.masters:
        return [Slots(tuple(ref.shape for ref in own)) for own in optimizer.masters]
    state, groups = optimizer.torch.state, optimizer.torch.groups
    shown: list[list[Shape | None]] = []
    for group in groups:  # the shape that the states of each show; None where they show none, or several
        shown.append([])
        for slot in group.slots:
            tensors = (value for name, value in state.get(slot, {}).items() if name != STEP)
            shapes = {value.shape for value in tensors if isinstance(value, TensorRef)}
            if len(shapes) > 1:  # counts beside others aside
                shapes = {shape for shape in shapes if prod(shape) != 1}
            shown[-1].append(shapes.pop() if len(shapes) == 1 else None)
    if all(shape is None or prod(shape) == 1 for own in shown for shape in own):  # counts, which are of no shape
        shown = [[None] * len(own) for own in shown]
    return [Slots(tuple(own)) for own in shown]


def _add_slots(
    optimizer: UnshardedOptimizer, number: int, params: Mapping[str, Shape], part: OptimizerPart, problems: Problems
) -> None:
    """Add the states of a group with a slot per parameter."""
    group = optimizer.torch.groups[number]
    masters = optimizer.masters[number] if optimizer.masters else ()
    if len(group.slots) != len(params) or (masters and len(masters) != len(params)):
        problems.wrong.append(
            f"group {number} has {counted(len(group.slots), 'parameter')}; expected {len(params)}: {', '.join(params)}"
        )
        return
    for at, (slot, (name, shape)) in enumerate(zip(group.slots, params.items(), strict=True)):
        states = optimizer.torch.state.get(slot, {})
        unplaced = []
        own = part.states.setdefault(name, {})
        for key, value in ({WEIGHT: masters[at], **states} if masters else states).items():
            whole = isinstance(value, TensorRef) and value.shape == shape
            found = (
                ShardedTensor.unsharded(value) if isinstance(value, TensorRef) and whole else state_from_scalar(value)
            )
            if value is None:
                part.dropped.append(f"{name}: state {key} is None")
            elif found is not None:
                own[key] = found
            else:
                part.extras.append(Extra(name=f"optimizer_state/{name}/{key}", value=value))
                unplaced.append(f"{name}: state {key} is {described(value)}")
        if unplaced:
            part.lose([name], unplaced)
    _share_fused_count(group, [part.states[name] for name in params], part)


def _share_fused_count(group: SavedGroup, states: Sequence[dict[str, StateSource]], part: OptimizerPart) -> None:
    """Give every parameter of a group the count of its last one, where FusedAdam counts (fused_adam.py, 0.19.8)."""
    stepped = [own for own in states if STEP in own]
    steps = [own[STEP] for own in stepped]
    of_fused_adam = "bias_correction" in group.hyper and type(group.hyper.get(STEP)) is int
    if not of_fused_adam or len(steps) < 2 or steps[-1] == steps[0] or any(own != steps[0] for own in steps[:-1]):
        return
    for own in stepped:
        own[STEP] = steps[-1]
    part.notes.append("FusedAdam counts the steps of a group in its last parameter, which are taken for all of them")
