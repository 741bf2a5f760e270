"""The scale of the loss in a checkpoint, whichever framework counted it, for a live scaler."""

from __future__ import annotations

from collections.abc import Callable

from ucp.contract.registry import run_extras
from ucp.contract.run_extras import LossScale, torch_state
from ucp.core.index import Extra, Index
from ucp.errors import UsageError
from ucp.live.match.findings import Findings
from ucp.live.resume.scheduler import Stateful

__all__ = ["scaler_state"]

_FIELDS = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
    "growth_tracker": "growth_tracker",
}
"""Entry of the state of a scaler (torch's, Megatron's) to the number that it is."""
_COMPANION = "companion/scaler.pt"
"""File of the Trainer and of accelerate."""


def scaler_state(
    index: Index, scaler: object, read: Callable[[Extra], object], findings: Findings
) -> tuple[str, dict[str, object]] | None:
    """The extra that holds the scale, and the state to give to the scaler; None where there is nothing to give.

    Raises UsageError for what is no scaler.
    """
    if not isinstance(scaler, Stateful):
        raise UsageError(f"expected a scaler with state_dict and load_state_dict; got {type(scaler).__name__}")
    live = scaler.state_dict()
    if not live:
        findings.notes.append("the scaler is not enabled: nothing is restored into it")
        return None
    found = run_extras(index).scale(index) or _in_companion(index, read)
    if found is None:
        findings.problems.append("scaler: the checkpoint holds no scale of the loss that adapts itself")
        return None
    said = {key: _number(getattr(found, own), read) for key, own in _FIELDS.items() if key in live}
    told = {key: _like(live[key], own) for key, own in said.items() if own is not None}
    kept = [key for key in live if key not in told]
    if kept:
        findings.notes.append(f"the scaler keeps its own {', '.join(kept)}, which the checkpoint does not say")
    return found.found_in, {**live, **told}


def _in_companion(index: Index, read: Callable[[Extra], object]) -> LossScale | None:
    for extra in index.extras:
        state = read(extra) if extra.name == _COMPANION else None
        if isinstance(state, dict) and {"scale", "_growth_tracker"} <= state.keys():
            return torch_state(extra.name, state)
    return None


def _number(value: object, read: Callable[[Extra], object]) -> float | None:
    """A number, out of the tensor that it may be in."""
    import torch

    live = read(Extra(name="scale", value=value))
    found = live.item() if isinstance(live, torch.Tensor) and live.numel() == 1 else live
    return found if isinstance(found, int | float) else None


def _like(live: object, number: float) -> object:
    import torch

    return torch.full_like(live, number) if isinstance(live, torch.Tensor) else number
