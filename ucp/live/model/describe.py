"""Which adapter describes a live run: that of its framework, or torch's own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from ucp.contract.registry import live_adapters
from ucp.errors import LoadError, UsageError, listed
from ucp.live.adapters import LiveModel, LiveOptimizer, LiveRequest, LiveRun
from ucp.live.model.dtensor import check_axes
from ucp.live.model.meta import allocate, find_device, has_meta_tensors
from ucp.live.model.module import describe_modules, torch_type
from ucp.live.model.wrappers import FlatUnit, find_flat_units
from ucp.live.optimizer.flat_optimizer import describe_flat_optimizer
from ucp.live.optimizer.torch_optimizer import describe_masters, describe_zero_redundancy
from ucp.live.parts import LiveTensor

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer


def describe_run(request: LiveRequest) -> LiveRun:
    """The rank's parts, by the adapter that claims them, or as a torch module with a torch optimizer."""
    for adapter in live_adapters():
        if adapter.claims(request):
            return adapter.describe(request)
    from torch import optim

    modules = _modules(request.model)
    units = [unit for module in modules for unit in find_flat_units(module)]
    dtype = None if request.dtype is None else torch_type(request.dtype)
    model = describe_modules(modules, units, dtype=dtype)
    if has_meta_tensors(modules):
        model = replace(model, device=find_device(modules))
    check_axes(model.tensors, request.mesh.topology)
    is_placed = any(not own.part.is_full for own in model.tensors)  # torch says itself how they lie
    is_named = is_placed and request.mesh.degree("pp") == 1  # but not how stages number their layers
    prepare = partial(_prepared, modules, units, dtype)
    run = LiveRun(model=model, prepare=prepare, has_global_names=is_named, has_global_parts=is_placed)
    if isinstance(request.optimizer, optim.Optimizer) and not units and not _is_zero(request.optimizer):
        model, live = describe_masters(request.optimizer, model, modules, request.masters)
        return replace(run, model=model, optimizer=live, finish=live.cast_weights)
    if request.masters is not None:
        raise UsageError("expected masters= only with a torch optimizer over them, and not for FSDP1 or ZeRO")
    return replace(run, optimizer=_optimizer(request.optimizer, model, units))


def _is_zero(optimizer: object) -> bool:
    return type(optimizer).__name__ == "ZeroRedundancyOptimizer"


def _prepared(
    modules: Sequence[nn.Module],
    units: Sequence[FlatUnit],
    dtype: torch.dtype | None,
    model: LiveModel,
    brought: Collection[str],
) -> LiveModel:
    """The model with memory for what has none."""
    from torch import nn

    if model.device is None:
        return model

    def params() -> dict[str, nn.Parameter]:
        every = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        return dict(every.named_parameters(remove_duplicate=False))

    def shown(own: LiveTensor) -> str:
        tied = f", tied as {', '.join(own.names)}" if len(own.names) > 1 else ""
        return f"{own.dtype} {list(own.part.local_shape)}{tied}"

    params_before, before = params(), describe_modules(modules, units, dtype=dtype)
    allocate(modules, {number for number, name in model.owners.items() if name in brought}, model.device, dtype)
    params_after, after = params(), describe_modules(modules, units)
    replaced = [
        f"{name}: is another Parameter" for name, own in params_before.items() if params_after.get(name) is not own
    ]
    made = {own.name: own for own in after.tensors}
    for own in before.tensors:
        if own.name in brought and own != (new := made.get(own.name)):
            is_now = shown(new) if new else "no tensor of its own"
            replaced.append(f"{own.name}: is {is_now}, and was {shown(own)}")
    if replaced:
        raise LoadError(
            "expected reset_parameters and init_weights to fill what the model has in place; these were replaced\n"
            f"{listed(replaced)}\nCall model.to_empty(device=...) and fill them before load_into and the optimizer"
        )
    handles = {
        name: after.handles[name][tuple(slice(0, length) for length in own.shape)]  # without padding
        for name, own in model.handles.items()
        if name in after.handles
    }
    return replace(model, handles=handles)


def _modules(model: object) -> list[nn.Module]:
    from torch import nn

    given = [*model] if isinstance(model, list | tuple) else [model]
    modules = [own for own in given if isinstance(own, nn.Module)]
    if not modules or len(modules) < len(given):
        got = ", ".join(type(own).__name__ for own in given) or "none"
        raise UsageError(f"expected a torch module, or a list of them (chunks of a virtual pipeline); got {got}")
    return modules


def _optimizer(optimizer: object | None, model: LiveModel, units: Sequence[FlatUnit]) -> LiveOptimizer | None:
    from torch import optim

    if _is_zero(optimizer):
        return describe_zero_redundancy(cast("ZeroRedundancyOptimizer", optimizer), model)  # its module may be absent
    if isinstance(optimizer, optim.Optimizer):
        return describe_flat_optimizer(optimizer, model, units)
    if optimizer is None or optimizer is False:
        return None
    if isinstance(optimizer, LiveOptimizer):
        return optimizer
    raise UsageError(
        f"expected a torch optimizer, what describes one (ucp.live.adapters.LiveOptimizer), or none; got "
        f"{type(optimizer).__name__}"
    )
