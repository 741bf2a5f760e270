"""The optimizer without ZeRO, which lies inside the model-states file, in one of three shapes.

- a torch optimizer over the model's own parameters: `state`, `param_groups`;
- FP16_UnfusedOptimizer: the same over a master per parameter, in `fp32_groups`;
- FP16_Optimizer: the same over one flat master per group, in `fp32_groups_flat`.

None of them has names. Files that ucp wrote have them in `param_shapes`, which DeepSpeed leaves None without ZeRO. Else
torch's own `param_names` tell where they are there; in the third shape, the module's tensors do, as views of a flat
tensor per group; else order and shapes must leave one answer (`matching`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ucp.contract.problems import Problems
from ucp.contract.rank_extras import Checksums
from ucp.core.index import Extra, ParamGroup
from ucp.core.names import STEP, WEIGHT
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError, counted, listed
from ucp.io.pickle.fields import Shape, described, integer, mapping, sequence, tensor, text
from ucp_formats.deepspeed.experts import is_expert
from ucp_formats.deepspeed.read.extras import UNSTEPPED
from ucp_formats.deepspeed.read.optimizer.flat_group import Bucket, Shard, bucket_states, scalar_state
from ucp_formats.deepspeed.read.optimizer.flat_layout import shared_buffers
from ucp_formats.deepspeed.read.optimizer.match_slots import (
    AmbiguousError,
    FlatSlots,
    NoMatchError,
    SlotGroup,
    Slots,
    match_stages,
)
from ucp_formats.deepspeed.read.optimizer.part import OptimizerPart, hyper_parameters, take_group_steps
from ucp_formats.deepspeed.read.optimizer.stored import State, StoredTensor

__all__ = ["INFERRED", "REMEDY", "WholeOptimizer", "names_by_shape", "read_whole", "slots_of"]

INFERRED = (
    "the optimizer numbers its parameters without naming them: names are inferred from the order of the model and the "
    "shapes, which leave one answer"
)
"""What to tell where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOptimizer:
    """`optimizer` of a model-states file."""

    where: str
    """The file, for messages."""
    saved: Mapping[object, object]
    """What was saved."""
    params: Mapping[str, TensorRef]
    """Tensors of the module that can be parameters, in the order of the model; tied ones once."""
    recorded: Sequence[Mapping[str, Shape]] = ()
    """`param_shapes`: name to shape of each parameter of every group, in its order; empty where it is None."""

    @property
    def kind(self) -> str:
        """Class of DeepSpeed, or "torch"."""
        if "fp32_groups_flat" in self.saved:
            return "FP16_Optimizer"
        return "FP16_UnfusedOptimizer" if "fp32_groups" in self.saved else "torch"

    @property
    def inner(self) -> Mapping[object, object]:
        """state_dict of the torch optimizer."""
        found = self.saved if self.kind == "torch" else self.saved.get("optimizer_state_dict")
        return mapping(found, f"optimizer of {self.where}")

    @property
    def groups(self) -> list[Mapping[object, object]]:
        """`param_groups`."""
        where = f"param_groups of {self.where}"
        return [mapping(group, where) for group in sequence(self.inner.get("param_groups"), where)]

    def numbers(self, group: Mapping[object, object]) -> Sequence[int]:
        """Numbers of the slots of a group."""
        where = f"params of a group of {self.where}"
        return [integer(number, where) for number in sequence(group.get("params"), where)]

    def state(self, number: int) -> dict[str, object]:
        """States of a slot; empty when it was never stepped."""
        where = f"state[{number}] of {self.where}"
        own = mapping(mapping(self.inner.get("state"), f"state of {self.where}").get(number, {}), where)
        return {text(key, where): value for key, value in own.items()}

    @property
    def is_bare(self) -> bool:
        """Whether it has neither states nor masters: then nothing is lost without knowing which parameter is which."""
        return self.kind == "torch" and not mapping(self.inner.get("state"), f"state of {self.where}")

    def masters(self) -> list[Sequence[object]]:
        """Masters of every group; of no group, for an optimizer over the model's own parameters."""
        where = f"masters of {self.where}"
        match self.kind:
            case "FP16_UnfusedOptimizer":
                groups = sequence(self.saved["fp32_groups"], where)
                return [sequence(group, where) for group in groups]
            case "FP16_Optimizer":
                return [[flat] for flat in sequence(self.saved["fp32_groups_flat"], where)]
            case _:
                return []


def read_whole(optimizer: WholeOptimizer, checksums: Checksums, order: Sequence[Sequence[str]] | None) -> OptimizerPart:
    """States and groups of an optimizer without ZeRO.

    `order`: names of every group in its order, when the user says so; else they are inferred.
    """
    part = OptimizerPart()
    try:
        names = [tuple(own) for own in order] if order is not None else _names(optimizer, checksums, part)
    except UnsupportedError:
        if not optimizer.is_bare:
            raise
        part.extras.append(Extra(name=UNSTEPPED, value=list(optimizer.groups)))
        part.notes = ["the optimizer has never stepped and names no parameters: its groups are kept as an extra only"]
        return part
    _check_count(optimizer, names)
    problems = Problems()
    flat = optimizer.kind == "FP16_Optimizer"
    for number, (group, own) in enumerate(zip(optimizer.groups, names, strict=True)):
        if flat:
            part.add(bucket_states(_flat_bucket(optimizer, number, own), checksums, problems))
        else:
            _add_slots(optimizer, number, own, part, problems)
        hyper = hyper_parameters(group, f"param_groups[{number}] of {optimizer.where}")
        part.groups.append(ParamGroup(params=own, hyper=hyper))
    problems.raise_any(optimizer.where, "no ZeRO")
    take_group_steps(part)
    return part


def _check_count(optimizer: WholeOptimizer, names: Sequence[Sequence[str]]) -> None:
    unknown = [name for own in names for name in own if name not in optimizer.params]
    if unknown or len(names) != len(optimizer.groups):
        raise MalformedError(
            f"expected names of the module for the {len(optimizer.groups)} parameter groups of {optimizer.where}; got "
            f"{counted(len(names), 'group')}{', with unknown names' if unknown else ''}\n{listed(unknown)}"
        )


def _names(optimizer: WholeOptimizer, checksums: Checksums, part: OptimizerPart) -> list[tuple[str, ...]]:
    """Names of every group, from the best record there is."""
    if optimizer.recorded:
        return _by_record(optimizer)
    found = _by_torch(optimizer)
    if found is None and optimizer.kind == "FP16_Optimizer":
        found = _by_storage(optimizer, checksums)
    if found is not None:
        return found
    part.notes.append(INFERRED)
    return _by_shape(optimizer)


def _by_record(optimizer: WholeOptimizer) -> list[tuple[str, ...]]:
    """Names in `param_shapes`, which ucp writes. Raises MalformedError where its shapes are not the module's."""
    wrong = [
        f"{name}: {list(shape)} in param_shapes, {list(optimizer.params[name].shape)} in module"
        for own in optimizer.recorded
        for name, shape in own.items()
        if name in optimizer.params and optimizer.params[name].shape != shape
    ]
    if wrong:
        raise MalformedError(
            f"expected the shapes of the module in param_shapes of {optimizer.where}; got\n{listed(wrong)}\nthe file "
            "was changed after it was saved: take an unchanged copy, or set param_shapes to None"
        )
    return [tuple(own) for own in optimizer.recorded]


def _by_storage(optimizer: WholeOptimizer, checksums: Checksums) -> list[tuple[str, ...]] | None:
    """Names by the flat tensors that the module's are views of; None where they are not, or two are as long.

    FP16_Optimizer makes every parameter of a group a view of one unpadded tensor (fused_optimizer.py, 0.19.8).
    """
    views: dict[int, list[tuple[int, int, str, int]]] = {}
    for name, ref in optimizer.params.items():
        storage = checksums.storage(ref) if ref.numel else None
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
    lengths = [tensor(flat[0], f"fp32_groups_flat of {optimizer.where}").numel for flat in optimizer.masters()]
    found = [_one(flats.get(length, [])) for length in lengths]
    certain = [own for own in found if own is not None]
    return certain if len(certain) == len(set(lengths)) == len(lengths) else None


def _one(flats: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The one flat tensor of a length: that with several views, as only a group has; else the only one."""
    several = [own for own in flats if len(own) > 1]
    candidates = several or flats
    return candidates[0] if len(candidates) == 1 else None


def _by_torch(optimizer: WholeOptimizer) -> list[tuple[str, ...]] | None:
    """Names that torch kept because the optimizer was built from named parameters (torch 2.6).

    A group of FP16_Optimizer has one flat tensor, whatever the number of its parameters.
    """
    flat = optimizer.kind == "FP16_Optimizer"
    found = []
    for group in optimizer.groups:
        names = group.get("param_names")
        if not isinstance(names, list) or not (flat or len(names) == len(optimizer.numbers(group))):
            return None
        if not all(isinstance(name, str) and name in optimizer.params for name in names):
            return None
        found.append(tuple(map(str, names)))
    return found


def _by_shape(optimizer: WholeOptimizer) -> list[tuple[str, ...]]:
    """Names of every group; DeepSpeed keeps those of experts apart where it is asked to, and says `moe` of them."""
    slots = slots_of(optimizer)
    of_experts = [group.get("moe") is True for group in optimizer.groups]
    if not any(of_experts):
        return list(names_by_shape([slots], [optimizer.params], optimizer.where)[0])
    found: dict[int, tuple[str, ...]] = {}
    for kind in (False, True):
        numbers = [number for number, own in enumerate(of_experts) if own is kind]
        params = {name: ref for name, ref in optimizer.params.items() if is_expert(name) is kind}
        (names,) = names_by_shape([[slots[number] for number in numbers]], [params], optimizer.where)
        found.update(zip(numbers, names, strict=True))
    return [found[number] for number in range(len(slots))]


def names_by_shape(
    slots: Sequence[Sequence[SlotGroup]], layers: Sequence[Mapping[str, TensorRef]], where: str
) -> list[tuple[tuple[str, ...], ...]]:
    """Names of every group of an optimizer, or of that of each stage of a pipeline, by their `slots`.

    Raises UnsupportedError when none or several assignments fit.
    """
    groups = sum(map(len, slots))
    try:
        found = match_stages(slots, [[(name, ref.shape) for name, ref in layer.items()] for layer in layers])
    except NoMatchError:
        raise UnsupportedError(
            f"no assignment of the module's parameters, in their order, to the {counted(groups, 'parameter group')} of "
            f"{where} fits the shapes of the optimizer states. {REMEDY}"
        ) from None
    except AmbiguousError as error:
        raise UnsupportedError(
            f"the optimizer in {where} does not name its parameters, and more than one assignment fits; it is not "
            f"known to which group these belong:\n{listed(error.names)}\n{REMEDY}"
        ) from None
    return [own.groups for own in found]


REMEDY = (
    "Save again with an optimizer built from model.named_parameters() (torch 2.6 or later keeps the names), or with "
    "ZeRO stage 1. Or write the names of each group, in its order and with their shapes, into a copy of each file that "
    "has an optimizer: saved = torch.load(FILE); saved['param_shapes'] = [{name: SHAPES[name] for name in group} for "
    "group in GROUPS]; torch.save(saved, FILE)"
)
"""What to do where it is not known."""


def slots_of(optimizer: WholeOptimizer) -> list[SlotGroup]:
    """Slots of every group, as `matching` takes them."""
    masters = optimizer.masters()
    where = f"masters of {optimizer.where}"
    if optimizer.kind == "FP16_Optimizer":
        return [FlatSlots(tensor(own[0], where).numel) for own in masters]
    if masters:
        return [Slots(tuple(tensor(ref, where).shape for ref in own)) for own in masters]
    shown = [[_shape_of(optimizer.state(n)) for n in optimizer.numbers(group)] for group in optimizer.groups]
    if all(shape is None or prod(shape) == 1 for own in shown for shape in own):  # counts, which are of no shape
        shown = [[None] * len(own) for own in shown]
    return [Slots(tuple(own)) for own in shown]


def _shape_of(state: Mapping[str, object]) -> Shape | None:
    """Shape that the states of a parameter show, counts beside others aside; None where they do not, or differ."""
    shapes = {value.shape for name, value in state.items() if isinstance(value, TensorRef) and name != STEP}
    if len(shapes) > 1:
        shapes = {shape for shape in shapes if prod(shape) != 1}
    return shapes.pop() if len(shapes) == 1 else None


def _flat_bucket(optimizer: WholeOptimizer, number: int, names: Sequence[str]) -> Bucket:
    flat = tensor(optimizer.masters()[number][0], f"fp32_groups_flat[{number}] of {optimizer.where}")
    own = {name: optimizer.params[name].shape for name in names}
    numels = {name: optimizer.params[name].numel for name in names}
    (slot,) = optimizer.numbers(optimizer.groups[number])
    shard = Shard(rank=0, file=optimizer.where, weight=flat, states=optimizer.state(slot))
    layouts = shared_buffers(
        numels, ranks=1, paddings=None, first=flat.numel, known_from=f"fp32_groups_flat of {optimizer.where}"
    )
    return Bucket(label=f"group {number}", shapes=own, layouts=layouts, shards=(shard,))


def _add_slots(
    optimizer: WholeOptimizer, number: int, names: Sequence[str], part: OptimizerPart, problems: Problems
) -> None:
    """Add the states of a group with a slot per parameter."""
    slots = optimizer.numbers(optimizer.groups[number])
    masters = optimizer.masters()
    if len(slots) != len(names) or (masters and len(masters[number]) != len(names)):
        problems.wrong.append(
            f"group {number} has {counted(len(slots), 'parameter')}; expected {len(names)}: {', '.join(names)}"
        )
        return
    unplaced: dict[str, list[str]] = {}
    for at, (name, slot) in enumerate(zip(names, slots, strict=True)):
        states = optimizer.state(slot)
        if masters:
            states = {WEIGHT: masters[number][at], **states}
        own = part.states.setdefault(name, {})
        for key, value in states.items():
            found = _state(value, optimizer.params[name].shape)
            if value is None:
                part.dropped.append(f"{name}: state {key} is None")
            elif found is not None:
                own[key] = found
            else:
                part.extras.append(Extra(name=f"optimizer_state/{name}/{key}", value=value))
                unplaced.setdefault(name, []).append(f"{name}: state {key} is {described(value)}")
    for name, lines in unplaced.items():
        part.lose([name], lines)
    _share_fused_count(optimizer.groups[number], [part.states[name] for name in names], part)


def _share_fused_count(group: Mapping[object, object], states: Sequence[dict[str, State]], part: OptimizerPart) -> None:
    """Give every parameter of a group the count of its last one, where FusedAdam counts (fused_adam.py, 0.19.8)."""
    stepped = [own for own in states if STEP in own]
    steps = [own[STEP] for own in stepped]
    of_fused_adam = "bias_correction" in group and type(group.get(STEP)) is int
    if not of_fused_adam or len(steps) < 2 or steps[-1] == steps[0] or any(own != steps[0] for own in steps[:-1]):
        return
    for own in stepped:
        own[STEP] = steps[-1]
    part.notes.append("FusedAdam counts the steps of a group in its last parameter, which are taken for all of them")


def _state(value: object, shape: Shape) -> State | None:
    """A state of a parameter of `shape`; None when it is neither of that shape nor one number."""
    if not isinstance(value, TensorRef) or value.shape != shape:
        return scalar_state(value)
    return StoredTensor.whole(value)
