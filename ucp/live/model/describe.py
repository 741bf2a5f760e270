"""Describe a live run, by the adapter of its framework or as plain torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from ucp.contract.registry import live_adapters
from ucp.errors import LoadError, UsageError, format_list
from ucp.live.adapters import LiveModel, LiveOptimizer, LiveRequest, LiveRun
from ucp.live.model.dtensor import check_axes
from ucp.live.model.meta import allocate, find_device, has_meta_tensors
from ucp.live.model.module import describe_modules
from ucp.live.model.wrappers import FlatUnit, find_flat_units
from ucp.live.optimizer.flat_optimizer import describe_flat_optimizer
from ucp.live.optimizer.torch_optimizer import describe_masters, describe_zero_redundancy
from ucp.live.parts import LiveTensor

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer


def describe_run(request: LiveRequest) -> LiveRun:
    """The description of this rank's model and optimizer: of the adapter that claims them, or as plain torch."""
    for adapter in live_adapters():
        if adapter.claims(request):
            return adapter.describe(request)
    import torch
    from torch import optim

    modules = list_modules(request.model)
    units = [unit for module in modules for unit in find_flat_units(module)]
    dtype: torch.dtype | None = None if request.dtype is None else getattr(torch, request.dtype.value)
    model = describe_modules(modules, units, dtype=dtype)
    if has_meta_tensors(modules):
        model = replace(model, device=find_device(modules))
    check_axes(model.tensors, request.mesh.topology)
    has_global_parts = any(not tensor.part.is_full for tensor in model.tensors)  # DTensors, FSDP1
    run = LiveRun(
        model=model,
        prepare=partial(_allocate_model, modules, units, dtype),
        has_global_names=has_global_parts and request.mesh.degree("pp") == 1,  # stages may number layers from 0
        has_global_parts=has_global_parts,
    )
    optimizer = request.optimizer
    is_zero = type(optimizer).__name__ == "ZeroRedundancyOptimizer"  # by name: its module may be absent
    if isinstance(optimizer, optim.Optimizer) and not units and not is_zero:
        model, described = describe_masters(optimizer, model, modules, request.masters)
        return replace(run, model=model, optimizer=described, finish=described.cast_weights)
    if request.masters is not None:
        raise UsageError("expected masters= only with a torch optimizer that steps them, without FSDP1 or ZeRO")
    if optimizer is None or optimizer is False:
        return run
    live: LiveOptimizer
    if is_zero:
        live = describe_zero_redundancy(cast("ZeroRedundancyOptimizer", optimizer), model)
    elif isinstance(optimizer, optim.Optimizer):
        live = describe_flat_optimizer(optimizer, model, units)
    elif isinstance(optimizer, LiveOptimizer):
        live = optimizer
    else:
        raise UsageError(
            f"expected a torch optimizer, an implementation of ucp.live.adapters.LiveOptimizer, or none; got "
            f"{type(optimizer).__name__}"
        )
    return replace(run, optimizer=live)


def _allocate_model(
    modules: Sequence[nn.Module],
    units: Sequence[FlatUnit],
    dtype: torch.dtype | None,
    model: LiveModel,
    loaded: Collection[str],
) -> LiveModel:
    """The model, with tensors on the meta device allocated."""
    from torch import nn

    if model.device is None:
        return model

    def list_params() -> dict[str, nn.Parameter]:
        root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        return dict(root.named_parameters(remove_duplicate=False))

    def describe(tensor: LiveTensor | None) -> str:
        if tensor is None:
            return "no tensor of its own"
        tied = f", tied as {', '.join(tensor.names)}" if len(tensor.names) > 1 else ""
        return f"{tensor.dtype} {list(tensor.part.local_shape)}{tied}"

    params_before, before = list_params(), describe_modules(modules, units, dtype=dtype)
    allocate(modules, {number for number, name in model.owners.items() if name in loaded}, model.device, dtype)
    params_after, after = list_params(), describe_modules(modules, units)
    replaced = [
        f"{name}: is another Parameter" for name, param in params_before.items() if params_after.get(name) is not param
    ]
    tensors = {tensor.name: tensor for tensor in after.tensors}
    for tensor in before.tensors:
        if tensor.name in loaded and tensor != (current := tensors.get(tensor.name)):
            replaced.append(f"{tensor.name}: is {describe(current)}, and was {describe(tensor)}")
    if replaced:
        raise LoadError(
            "expected reset_parameters and init_weights to fill the tensors of the model in place; these were replaced"
            f"\n{format_list(replaced)}\nCall model.to_empty(device=...) and fill them before you make the optimizer "
            "and call load_into"
        )
    handles = {
        name: after.handles[name][tuple(slice(0, length) for length in handle.shape)]  # without padding
        for name, handle in model.handles.items()
        if name in after.handles
    }
    return replace(model, handles=handles)


def list_modules(model: object) -> list[nn.Module]:
    """The modules that the user passed: one, or the chunks of a virtual pipeline. Raises UsageError."""
    from torch import nn

    values = [*model] if isinstance(model, list | tuple) else [model]
    modules = [module for module in values if isinstance(module, nn.Module)]
    if not modules or len(modules) < len(values):
        got = ", ".join(type(value).__name__ for value in values) or "none"
        raise UsageError(f"expected a torch module, or a list of them (chunks of a virtual pipeline); got {got}")
    return modules
