"""The scale of the loss, as DeepSpeed counts it: by iterations (runtime/fp16/loss_scaler.py, fused_optimizer.py)."""

from __future__ import annotations

from ucp.contract.run_extras import LossScale
from ucp.core.index import Index
from ucp.core.pickle_values import Stub

__all__ = ["deepspeed_scale"]


def deepspeed_scale(index: Index) -> LossScale | None:
    """The scale, where it adapts itself."""
    for extra in index.extras:
        if extra.name == "loss_scaler" and extra.rank is None:
            state = extra.value.state if isinstance(extra.value, Stub) else extra.value
            if isinstance(state, dict) and (state.get("dynamic") or state.get("dynamic_loss_scale")):
                return _scale(state, grows_late=not isinstance(extra.value, Stub))
    return None


def _scale(state: dict[object, object], *, grows_late: bool) -> LossScale:
    """`grows_late`: without ZeRO it grows for the first time a step later."""
    current, last, window = (state.get(key) for key in ("cur_iter", "last_overflow_iter", "scale_window"))
    steps = None
    if isinstance(current, int) and isinstance(last, int) and isinstance(window, int):
        steps = max(current - last - 1 - grows_late, 0) % window
    factor = state.get("scale_factor")
    return LossScale(
        found_in="loss_scaler",
        scale=state.get("cur_scale"),
        growth_factor=factor,
        backoff_factor=1 / factor if isinstance(factor, float) and factor else None,
        growth_interval=window,
        growth_tracker=steps,
    )
