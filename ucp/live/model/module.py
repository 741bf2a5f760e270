"""A live module as names, shapes and types, and as the tensors behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from ucp.core.tensor import DType
from ucp.errors import LoadError, UnsupportedError, listed
from ucp.live.adapters import LiveModel
from ucp.live.model.dtensor import dtensor_part, is_dtensor, local_of
from ucp.live.model.meta import choose_dtype
from ucp.live.model.wrappers import FlatUnit, find_wrapper_paths, plain_name
from ucp.live.parts import LivePart, LiveTensor

if TYPE_CHECKING:
    import torch
    from torch import nn


def describe_model(model: nn.Module, units: Sequence[FlatUnit] = (), *, dtype: torch.dtype | None = None) -> LiveModel:
    """The parameters and persistent buffers of `model`. Raises UnsupportedError for parts that are not known.

    `units`: flat parameters that FSDP1 made of some of them. `dtype`: type to make floating parameters in that have no
    memory yet.
    """
    hidden = find_wrapper_paths(model)
    persistent = (
        list(model.state_dict(keep_vars=True))
        if not units
        else [
            # without what modules keep beside tensors, as the state dict of FSDP1 would gather it all
            f"{path}.{name}" if path else name
            for path, module in model.named_modules(remove_duplicate=False)
            for name, _ in module.named_buffers(recurse=False)
            if name not in getattr(module, "_non_persistent_buffers_set", ())
        ]
    )
    persistent = [plain_name(name, hidden) for name in persistent]
    flattened = frozenset(own for unit in units for own in unit.members)
    params = model.named_parameters(remove_duplicate=False)
    named: list[tuple[str, torch.Tensor]]
    named = [(plain_name(name, hidden), own) for name, own in params if id(own) not in flattened]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if plain_name(name, hidden) in set(persistent):
            named.append((plain_name(name, hidden), buffer))
    _check(named)
    names: dict[tuple[object, ...], list[str]] = {}
    handles: dict[tuple[object, ...], torch.Tensor] = {}
    for name, own in named:
        names.setdefault(_place(own), []).append(name)
        handles.setdefault(_place(own), own)
    pairs = list(overlapping({names[key][0]: local_of(own) for key, own in handles.items()}))
    if pairs:
        raise LoadError(
            f"expected every tensor in memory of its own; these share some\n{listed(pairs)}\nand are not the same "
            "elements in the same order, as tied ones are. Give each its own before load_into "
            "(param.data = param.data.clone())"
        )
    memory = {names[key][0]: _memory(own, dtype) for key, own in handles.items()}
    tensors = [
        LiveTensor(names=tuple(names[key]), dtype=dtype_of(memory[names[key][0]]), part=_part_of(own, names[key][0]))
        for key, own in handles.items()
    ]
    owners = {id(own): names[_place(own)][0] for _, own in named}
    for unit in units:
        pieces = dict(zip(unit.names, unit.ranges, strict=True))
        dtype_of_unit = dtype_of(unit.share)
        tensors += [LiveTensor(names=own, dtype=dtype_of_unit, part=piece.part) for own, piece in pieces.items()]
        memory |= {own[0]: piece.narrow(unit.share) for own, piece in pieces.items()}
        owners |= {id(own): unit.names[at][0] for at, own in enumerate(unit.originals)}
    odd = [name for name in persistent if name.endswith("_extra_state")]
    notes = (f"restore yourself what modules keep beside tensors: {', '.join(odd)}",) if odd else ()
    # paths of modules that say their layer's number, as Megatron's do
    layers = {plain_name(path, hidden): getattr(own, "layer_number", None) for path, own in model.named_modules()}
    return LiveModel(
        tensors=tuple(tensors),
        handles=memory,
        owners=owners,
        notes=notes,
        layer_numbers={path: number for path, number in layers.items() if isinstance(number, int)},
    )


def describe_modules(
    modules: Sequence[nn.Module], units: Sequence[FlatUnit] = (), *, dtype: torch.dtype | None = None
) -> LiveModel:
    """One module, or the chunks of a virtual pipeline as one; see `describe_model`."""
    from torch import nn

    if len(modules) == 1:
        return describe_model(modules[0], units, dtype=dtype)
    return replace(describe_model(nn.ModuleList(modules), units, dtype=dtype), chunks=len(modules))


def dtype_of(tensor: torch.Tensor) -> DType:
    """Element type. Raises ValueError for one that checkpoints do not have."""
    return DType(str(tensor.dtype).removeprefix("torch."))


def torch_type(dtype: DType) -> torch.dtype:
    """The same, as torch has it."""
    import torch

    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """The same for tensors that are the same elements."""
    local = local_of(tensor)
    if not local.numel() or local.is_meta:
        return (id(tensor),)
    return (
        local.untyped_storage().data_ptr(),
        local.storage_offset(),
        local.dtype,
        tuple(local.shape),
        tuple(step for step, length in zip(local.stride(), local.shape, strict=True) if length > 1),
    )


def _memory(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Where the rank's elements go; without memory still, where the tensor has none."""
    local = local_of(tensor)
    wanted = choose_dtype(tensor, dtype) if local.is_meta else local.dtype
    if wanted is local.dtype:
        return local
    made = local.detach().to(wanted)
    vars(made).update(vars(tensor))
    return made


def _part_of(tensor: torch.Tensor, name: str) -> LivePart:
    return dtensor_part(tensor, name) if is_dtensor(tensor) else LivePart.full(tuple(tensor.shape))


def _check(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    sharded = [
        f"{name}: a parameter that DeepSpeed ZeRO-3 has partitioned" for name, own in named if hasattr(own, "ds_id")
    ]
    if sharded:
        raise UnsupportedError(f"expected parameters that torch alone lays out; got\n{listed(sharded)}")
    absent = [f"{name}: {why}" for name, own in named for why in _absence(own)]
    if absent:
        raise LoadError(f"expected parameters that have memory to load into; got\n{listed(absent)}")


def _absence(tensor: torch.Tensor) -> Iterator[str]:
    from torch.nn.parameter import is_lazy

    if is_lazy(tensor):
        yield "its shape is not known yet; run the model once"
    elif str(tensor.dtype).removeprefix("torch.") not in {dtype.value for dtype in DType}:
        yield f"no checkpoint has elements of type {tensor.dtype}"
    elif any(not step and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
        yield "it is expanded, so that several of its elements are one; make it contiguous"


Named = tuple[str, "torch.Tensor"]


def overlapping(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Pairs, by name, that share elements; what is cut from one memory and lies side by side or interleaved does not.

    >>> import torch
    >>> base = torch.zeros(6)
    >>> list(overlapping({"a": base[:4], "b": base[2:], "c": torch.zeros(3)}))
    ['a and b']
    """
    held = [named for named in tensors.items() if named[1].numel() and not named[1].is_meta]
    near: list[Named] = []
    end = 0
    for name, own in sorted(held, key=lambda named: (str(named[1].device), named[1].data_ptr())):
        if near and (own.device != near[0][1].device or own.data_ptr() >= end):
            yield from _shared(near)
            near, end = [], 0
        near.append((name, own))
        end = max(end, own.data_ptr() + _span(own))
    yield from _shared(near)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _shared(near: Sequence[Named]) -> Iterator[str]:
    """Pairs among tensors whose spans meet, found by marking what each has."""
    import torch

    if len(near) < 2:
        return
    starts = [own.data_ptr() - near[0][1].data_ptr() for _, own in near]
    unit = gcd(*starts, *(own.itemsize for _, own in near))  # bytes that are marked at once
    spans = [start + _span(own) for start, (_, own) in zip(starts, near, strict=True)]
    marks = torch.zeros(max(spans) // unit, dtype=torch.int32, device=near[0][1].device)
    for at, (start, (name, own)) in enumerate(zip(starts, near, strict=True), 1):
        width = own.itemsize // unit
        marked = marks.as_strided((*own.shape, width), (*(step * width for step in own.stride()), 1), start // unit)
        if before := int(marked.max()):
            yield f"{near[before - 1][0]} and {name}"
        marked.fill_(at)
