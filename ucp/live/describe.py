"""Which adapter describes a live run: that of its framework, or torch's own."""

from __future__ import annotations

from ucp.contract.registry import live_adapters
from ucp.errors import UsageError
from ucp.live.adapters import LiveRequest, LiveRun
from ucp.live.model.module import describe_model
from ucp.live.optimizer.torch_optimizer import describe_optimizer

__all__ = ["described"]


def described(request: LiveRequest) -> LiveRun:
    """The rank's parts, by the adapter that claims them, or as a torch module with a torch optimizer."""
    for adapter in live_adapters():
        if adapter.claims(request):
            return adapter.describe(request)
    from torch import nn, optim

    handle = request.optimizer or None
    if not isinstance(request.model, nn.Module) or not isinstance(handle, optim.Optimizer | None):
        named = " and ".join(type(own).__name__ for own in (request.model, handle) if own is not None)
        raise UsageError(f"expected a torch module, and a torch optimizer or none; got {named}")
    model = describe_model(request.model)
    optimizer = None if handle is None else describe_optimizer(handle, model)
    return LiveRun(model=model, optimizer=optimizer)
