"""Where frameworks keep what a run goes on with beside its model: schedulers, the scale of the loss, ranks' own things.

A format states it as data (`Format.run`); what brings a checkpoint into a live run reads it there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ucp.core.index import Index

__all__ = ["LossScale", "RunExtras", "torch_scale", "torch_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """A scale of the loss that adapts itself, as `torch.amp.GradScaler` counts it. None: not recorded.

    A number may be a reference to a tensor of one element.
    """

    found_in: str
    """Name of the extra."""
    scale: object
    """What losses are multiplied by."""
    growth_factor: object = None
    """What the scale is multiplied by when it grows."""
    backoff_factor: object = None
    """What it is multiplied by after an overflow."""
    growth_interval: object = None
    """Steps without overflow after which it grows."""
    growth_tracker: object = None
    """Such steps since it last changed."""


_SCALERS = ("scaler", "grad_scaler", "loss_scaler", "GradScaler")
"""Names that scripts save the state of a `torch.amp.GradScaler` under."""


def torch_scale(index: Index) -> LossScale | None:
    """The state of a `torch.amp.GradScaler` among the extras, if there is one."""
    for extra in index.extras:
        state = extra.value
        if extra.name in _SCALERS and isinstance(state, dict) and {"scale", "_growth_tracker"} <= state.keys():
            return torch_state(extra.name, state)
    return None


def torch_state(name: str, state: dict[object, object]) -> LossScale:
    """The state of a `torch.amp.GradScaler`."""
    factors = {key: state.get(key) for key in ("growth_factor", "backoff_factor", "growth_interval")}
    return LossScale(found_in=name, scale=state["scale"], growth_tracker=state["_growth_tracker"], **factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExtras:
    """Which extras of a format are what a run goes on with."""

    schedulers: tuple[str, ...] = ("lr_scheduler", "lr_schedulers", "scheduler")
    """Those that are the state of a learning rate scheduler, or a list with one."""
    scale: Callable[[Index], LossScale | None] = torch_scale
    """Finds the scale of the loss."""
    places: re.Pattern[str] | None = None
    """NAME/PLACE of what each rank has for itself: groups `name`, and `tp`, `pp`, `dp`, `ep` for the place.

    PLACE may be a key of a dict. A list has one entry for each dp rank of the place, or one for all.
    """
    client: str = ""
    """Name of the extra with all that the training script handed over, a dict; empty where each is an extra."""
