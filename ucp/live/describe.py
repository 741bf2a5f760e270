"""Which adapter describes a live run: that of its framework, or torch's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ucp.contract.registry import live_adapters
from ucp.errors import UsageError
from ucp.live.adapters import LiveModel, LiveOptimizer, LiveRequest, LiveRun
from ucp.live.model.fsdp1 import FlatUnit, flat_units
from ucp.live.model.meta import give_memory, place_of
from ucp.live.model.module import describe_model
from ucp.live.optimizer.flat_optimizer import describe_flat_optimizer
from ucp.live.optimizer.torch_optimizer import describe_optimizer
from ucp.live.optimizer.zero_redundancy import describe_zero_redundancy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.optim import Optimizer

__all__ = ["described"]


def described(request: LiveRequest) -> LiveRun:
    """The rank's parts, by the adapter that claims them, or as a torch module with a torch optimizer."""
    for adapter in live_adapters():
        if adapter.claims(request):
            return adapter.describe(request)
    from torch import nn, optim

    if not isinstance(request.model, nn.Module) or not isinstance(request.optimizer, optim.Optimizer | None):
        named = " and ".join(type(own).__name__ for own in (request.model, request.optimizer) if own is not None)
        raise UsageError(f"expected a torch module, and a torch optimizer or none; got {named}")
    units = flat_units(request.model)
    model = describe_model(request.model, units)
    prepare = None
    if any(own.is_meta for own in model.handles.values()):
        model, prepare = _blank(request.model, model)
    optimizer = None if request.optimizer is None else _optimizer(request.optimizer, model, units)
    run = LiveRun(model=model, optimizer=optimizer)
    return run if prepare is None else replace(run, prepare=prepare)


def _blank(module: nn.Module, model: LiveModel) -> tuple[LiveModel, Callable[[Collection[str]], None]]:
    """A model some of which has no memory, and what gives it memory."""
    place, handles = place_of(module), dict(model.handles)

    def prepare(brought: Collection[str]) -> None:
        give_memory(module, {number for number, name in model.owners.items() if name in brought}, place, None)
        handles.update(describe_model(module).handles)

    return replace(model, handles=handles, place=place), prepare


def _optimizer(optimizer: Optimizer, model: LiveModel, units: Sequence[FlatUnit]) -> LiveOptimizer:
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        return describe_zero_redundancy(cast("ZeroRedundancyOptimizer", optimizer), model)  # its module may be absent
    if units:
        return describe_flat_optimizer(optimizer, model, units)
    return describe_optimizer(optimizer, model)
