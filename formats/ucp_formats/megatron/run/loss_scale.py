"""The scale of the loss, as Megatron's DynamicGradScaler keeps it (core/optimizer/grad_scaler.py)."""

from __future__ import annotations

from ucp.contract.run_extras import LossScale
from ucp.core.index import Index

__all__ = ["megatron_scale", "scaler_of"]


def megatron_scale(index: Index) -> LossScale | None:
    """The scale, where it adapts itself."""
    state = scaler_of(index)
    if not isinstance(state, dict) or not {"scale", "growth_tracker"} <= state.keys():
        return None
    return LossScale(found_in="optimizer", scale=state["scale"], growth_tracker=state["growth_tracker"])


def scaler_of(index: Index) -> object:
    """State of the gradient scaler, which fp16 needs; None where the source has none."""
    for extra in index.extras:
        if extra.name.startswith("optimizer/") and "grad_scaler" in extra.name.split("/"):
            return extra.value
        if extra.name == "optimizer" and isinstance(extra.value, dict):
            for own in (extra.value, *(own for own in extra.value.values() if isinstance(own, dict))):
                if own.get("grad_scaler"):
                    return own["grad_scaler"]
    return None
