"""Which adapter describes a live run: that of its framework, or torch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucp.contract.registry import live_adapters
from ucp.errors import UsageError
from ucp.live.adapters import LiveModel, LiveOptimizer, LiveRequest, LiveRun
from ucp.live.model.module import describe_modules
from ucp.live.optimizer.torch_optimizer import describe_optimizer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["described"]


def described(request: LiveRequest) -> LiveRun:
    """The rank's parts, by the adapter that claims them, or as a torch module with a torch optimizer."""
    for adapter in live_adapters():
        if adapter.claims(request):
            return adapter.describe(request)
    model = describe_modules(_modules(request.model))
    return LiveRun(model=model, optimizer=_optimizer(request.optimizer, model), is_placed=False)


def _modules(model: object) -> list[nn.Module]:
    from torch import nn

    given = [*model] if isinstance(model, list | tuple) else [model]
    modules = [own for own in given if isinstance(own, nn.Module)]
    if not modules or len(modules) < len(given):
        got = ", ".join(type(own).__name__ for own in given) or "none"
        raise UsageError(f"expected a torch module, or a list of them (chunks of a virtual pipeline); got {got}")
    return modules


def _optimizer(optimizer: object | None, model: LiveModel) -> LiveOptimizer | None:
    from torch import optim

    if optimizer is None or isinstance(optimizer, optim.Optimizer):
        return None if optimizer is None else describe_optimizer(optimizer, model)
    if isinstance(optimizer, LiveOptimizer):
        return optimizer
    raise UsageError(
        f"expected a torch optimizer, what describes one (ucp.live.adapters.LiveOptimizer), or none; got "
        f"{type(optimizer).__name__}"
    )
