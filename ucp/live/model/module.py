"""Describe a live module: names, shapes and dtypes, and the tensors to load into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING

from ucp.core.tensor import DType
from ucp.errors import LoadError, UnsupportedError, format_list
from ucp.live.adapters import LiveModel
from ucp.live.model.dtensor import dtensor_part, is_dtensor, local_of
from ucp.live.model.meta import choose_dtype
from ucp.live.model.wrappers import FlatUnit, find_wrapper_paths, plain_name
from ucp.live.parts import LivePart, LiveTensor

if TYPE_CHECKING:
    import torch
    from torch import nn


def describe_modules(
    modules: Sequence[nn.Module], units: Sequence[FlatUnit] = (), *, dtype: torch.dtype | None = None
) -> LiveModel:
    """The parameters and persistent buffers of a module, or of the chunks of a virtual pipeline together.

    `units`: flat parameters that FSDP1 made of some of them. `dtype`: for floating-point parameters on the meta device.
    Raises UnsupportedError if it is not known which parts they are, LoadError for tensors that nothing can be loaded
    into.
    """
    from torch import nn

    model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    wrappers = find_wrapper_paths(model)
    persistent = [plain_name(name, wrappers) for name in _find_persistent(model, units)]
    flattened = frozenset(member for unit in units for member in unit.members)
    named: list[tuple[str, torch.Tensor]] = [
        (plain_name(name, wrappers), param)
        for name, param in model.named_parameters(remove_duplicate=False)
        if id(param) not in flattened
    ]
    for path, buffer in model.named_buffers(remove_duplicate=False):
        if (name := plain_name(path, wrappers)) in set(persistent):
            named.append((name, buffer))
    _check_loadable(named)
    names: dict[tuple[object, ...], list[str]] = {}
    handles: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        tied = names.setdefault(_identify(tensor), [])
        tied.append(name)
        handles.setdefault(tied[0], tensor)
    overlaps = list(find_overlaps({name: local_of(tensor) for name, tensor in handles.items()}))
    if overlaps:
        raise LoadError(
            "expected every tensor to have its own memory, or to be tied to another; these share memory and are not "
            f"tied:\n{format_list(overlaps)}\nGive each its own memory before load_into "
            "(param.data = param.data.clone())"
        )
    memory = {name: _find_memory(tensor, dtype) for name, tensor in handles.items()}
    tensors = []
    for tied in names.values():
        handle = handles[tied[0]]
        part = dtensor_part(handle, tied[0]) if is_dtensor(handle) else LivePart.full(tuple(handle.shape))
        tensors.append(LiveTensor(names=tuple(tied), dtype=dtype_of(memory[tied[0]]), part=part))
    owners = {id(tensor): names[_identify(tensor)][0] for _, tensor in named}
    for unit in units:
        for flat_names, flat_range in zip(unit.names, unit.ranges, strict=True):
            tensors.append(LiveTensor(names=flat_names, dtype=dtype_of(unit.share), part=flat_range.part))
            memory[flat_names[0]] = flat_range.narrow(unit.share)
        owners |= {id(original): unit.names[number][0] for number, original in enumerate(unit.originals)}
    extra_state = [name for name in persistent if name.endswith("_extra_state")]
    # paths of modules that give their layer's number, as Megatron's do
    layers = {plain_name(path, wrappers): getattr(m, "layer_number", None) for path, m in model.named_modules()}
    return LiveModel(
        tensors=tuple(tensors),
        handles=memory,
        owners=owners,
        notes=(f"not restored, set it yourself: {', '.join(extra_state)}",) if extra_state else (),
        chunks=len(modules),
        layer_numbers={path: number for path, number in layers.items() if isinstance(number, int)},
    )


def dtype_of(tensor: torch.Tensor) -> DType:
    """Dtype of the elements. Raises ValueError for one that checkpoints do not have."""
    return DType(str(tensor.dtype).removeprefix("torch."))


def _find_persistent(model: nn.Module, units: Sequence[FlatUnit]) -> list[str]:
    """Names in the state dict; with FSDP1 only those of buffers, as a state dict would gather all parameters."""
    if not units:
        return list(model.state_dict(keep_vars=True))
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name, _ in module.named_buffers(recurse=False)
        if name not in getattr(module, "_non_persistent_buffers_set", ())
    ]


def _identify(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that is equal for tensors that consist of the same elements."""
    local = local_of(tensor)
    if not local.numel() or local.is_meta:
        return (id(tensor),)
    strides = tuple(step for step, length in zip(local.stride(), local.shape, strict=True) if length > 1)
    return local.untyped_storage().data_ptr(), local.storage_offset(), local.dtype, tuple(local.shape), strides


def _find_memory(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Where the rank's elements are stored; still on the meta device if the tensor is."""
    local = local_of(tensor)
    wanted = choose_dtype(tensor, dtype) if local.is_meta else local.dtype
    if wanted is local.dtype:
        return local
    converted = local.detach().to(wanted)
    vars(converted).update(vars(tensor))
    return converted


def _check_loadable(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    partitioned = [
        f"{name}: a parameter that DeepSpeed ZeRO-3 has partitioned"
        for name, tensor in named
        if hasattr(tensor, "ds_id")
    ]
    if partitioned:
        raise UnsupportedError(f"expected parameters that torch alone shards; got\n{format_list(partitioned)}")
    problems = [f"{name}: {problem}" for name, tensor in named for problem in _find_problems(tensor)]
    if problems:
        raise LoadError(f"expected parameters that have memory to load into; got\n{format_list(problems)}")


def _find_problems(tensor: torch.Tensor) -> Iterator[str]:
    from torch.nn.parameter import is_lazy

    if is_lazy(tensor):
        yield "its shape is not known yet; run the model once"
    elif str(tensor.dtype).removeprefix("torch.") not in {dtype.value for dtype in DType}:
        yield f"no checkpoint has elements of type {tensor.dtype}"
    elif any(not step and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
        yield "it is expanded: several of its elements share memory; make it contiguous"


def find_overlaps(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Pairs, by name, that share elements; views of one memory that lie side by side or interleaved do not.

    >>> import torch
    >>> base = torch.zeros(6)
    >>> list(find_overlaps({"a": base[:4], "b": base[2:], "c": torch.zeros(3)}))
    ['a and b']
    """
    with_memory = [named for named in tensors.items() if named[1].numel() and not named[1].is_meta]
    near: list[tuple[str, torch.Tensor]] = []
    end = 0
    for name, tensor in sorted(with_memory, key=lambda named: (str(named[1].device), named[1].data_ptr())):
        if near and (tensor.device != near[0][1].device or tensor.data_ptr() >= end):
            yield from _mark_overlaps(near)
            near, end = [], 0
        near.append((name, tensor))
        end = max(end, tensor.data_ptr() + _span(tensor))
    yield from _mark_overlaps(near)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _mark_overlaps(near: Sequence[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Pairs among tensors whose spans meet, found by marking the elements of each."""
    import torch

    if len(near) < 2:
        return
    starts = [tensor.data_ptr() - near[0][1].data_ptr() for _, tensor in near]
    unit = gcd(*starts, *(tensor.itemsize for _, tensor in near))  # bytes that are marked at once
    end = max(start + _span(tensor) for start, (_, tensor) in zip(starts, near, strict=True))
    marks = torch.zeros(end // unit, dtype=torch.int32, device=near[0][1].device)
    for number, (start, (name, tensor)) in enumerate(zip(starts, near, strict=True), 1):
        width = tensor.itemsize // unit
        strides = *(step * width for step in tensor.stride()), 1
        marked = marks.as_strided((*tensor.shape, width), strides, start // unit)
        if before := int(marked.max()):
            yield f"{near[before - 1][0]} and {name}"
        marked.fill_(number)
