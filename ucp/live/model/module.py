"""A live module as names, shapes and types, and as the tensors behind them.

Names are those of the plain module: what wrappers put in front (DistributedDataParallel, torch.compile, activation
checkpointing) is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ucp.core.dtypes import DType
from ucp.errors import LoadError, UnsupportedError, listed
from ucp.live.adapters import LiveModel
from ucp.live.parts import LivePart, LiveTensor

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["describe_model", "describe_modules", "dtype_of"]

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""Class of a wrapper to the attribute that holds what it wraps."""

_SHARDING = {
    "FullyShardedDataParallel": "FSDP shards its parameters",
    "DeepSpeedEngine": "pass the module inside of it (engine.module) and no optimizer, or use its own load_checkpoint",
    "PipelineModule": "its layers are cut over pipeline ranks",
}
"""Class of a module that cannot be loaded to the reason."""


def describe_model(model: nn.Module) -> LiveModel:
    """The parameters and persistent buffers of `model`. Raises UnsupportedError where they are not whole."""
    hidden = _hidden(model)
    state = model.state_dict(keep_vars=True)
    persistent = {_plain(name, hidden) for name in state}
    named: list[tuple[str, torch.Tensor]]
    named = [(_plain(name, hidden), own) for name, own in model.named_parameters(remove_duplicate=False)]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if _plain(name, hidden) in persistent:
            named.append((_plain(name, hidden), buffer))
    _check_whole(named)
    names: dict[tuple[object, ...], list[str]] = {}
    handles: dict[tuple[object, ...], torch.Tensor] = {}
    for name, own in named:
        names.setdefault(_place(own), []).append(name)
        handles.setdefault(_place(own), own)
    tensors = tuple(
        LiveTensor(names=tuple(names[key]), dtype=dtype_of(own), part=LivePart.whole(tuple(own.shape)))
        for key, own in handles.items()
    )
    odd = [_plain(name, hidden) for name in state if name.endswith("_extra_state")]
    notes = (f"restore yourself what modules keep beside tensors: {', '.join(odd)}",) if odd else ()
    return LiveModel(
        tensors=tensors,
        handles={own.name: handle for own, handle in zip(tensors, handles.values(), strict=True)},
        owners={id(own): names[_place(own)][0] for _, own in named},
        notes=notes,
        layer_numbers=_layer_numbers(model, hidden),
    )


def describe_modules(modules: Sequence[nn.Module]) -> LiveModel:
    """One module, or the chunks of a virtual pipeline as one; see `describe_model`."""
    from torch import nn

    if len(modules) == 1:
        return describe_model(modules[0])
    return replace(describe_model(nn.ModuleList(modules)), chunks=len(modules))


def dtype_of(tensor: torch.Tensor) -> DType:
    """Element type. Raises ValueError for one that checkpoints do not have."""
    return DType(str(tensor.dtype).removeprefix("torch."))


def _hidden(model: nn.Module) -> frozenset[str]:
    """Paths of modules whose last component is a wrapper's own."""
    found = set()
    refused = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name in {base.__name__ for base in type(module).__mro__}:
            if name in _SHARDING:
                refused.append(f"{path or 'the model'} is a {name}: {_SHARDING[name]}")
            if name in _WRAPPERS:
                found.add(f"{path}.{_WRAPPERS[name]}" if path else _WRAPPERS[name])
    if refused:
        raise UnsupportedError(f"expected a module with whole parameters on every rank; got\n{listed(refused)}")
    return frozenset(found)


def _layer_numbers(model: nn.Module, hidden: frozenset[str]) -> dict[str, int]:
    """Path of every module that says its layer's number, as Megatron's do."""
    said = {_plain(path, hidden): getattr(own, "layer_number", None) for path, own in model.named_modules()}
    return {path: number for path, number in said.items() if isinstance(number, int)}


def _plain(name: str, hidden: frozenset[str]) -> str:
    parts = name.split(".")
    return ".".join(part for at, part in enumerate(parts) if ".".join(parts[: at + 1]) not in hidden)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """The same for tensors that are the same elements."""
    if not tensor.numel():
        return (id(tensor),)
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )


def _check_whole(named: list[tuple[str, torch.Tensor]]) -> None:
    sharded = [f"{name}: {why}" for name, own in named for why in _sharding(own)]
    if sharded:
        raise UnsupportedError(
            f"expected whole parameters on every rank; got\n{listed(sharded)}\nsharded models are not loaded yet"
        )
    absent = [f"{name}: {why}" for name, own in named for why in _absence(own)]
    if absent:
        raise LoadError(f"expected parameters that have memory to load into; got\n{listed(absent)}")


def _sharding(tensor: torch.Tensor) -> Iterator[str]:
    if hasattr(tensor, "device_mesh") and hasattr(tensor, "placements"):
        yield "a DTensor, which FSDP2 or tensor parallelism made"
    elif hasattr(tensor, "ds_id"):
        yield "a parameter that DeepSpeed ZeRO-3 has partitioned"


def _absence(tensor: torch.Tensor) -> Iterator[str]:
    from torch.nn.parameter import is_lazy

    if is_lazy(tensor):
        yield "its shape is not known yet; run the model once"
    elif tensor.is_meta:
        yield "it is on the meta device; call model.to_empty(device=...) first"
    elif str(tensor.dtype).removeprefix("torch.") not in {dtype.value for dtype in DType}:
        yield f"no checkpoint has elements of type {tensor.dtype}"
