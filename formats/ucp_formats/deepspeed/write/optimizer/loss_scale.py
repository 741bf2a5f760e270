"""The loss scale of an fp16 run, in the two shapes in which DeepSpeed saves it.

Stages 1 to 3 pickle the scaler object itself; stage 0 writes its numbers beside the optimizer. Both are made here, so
that a run keeps its scale, and its count of steps without overflow, across stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ucp.core.pickle_values import GlobalName, Stub
from ucp_formats.deepspeed.config import RunConfig

__all__ = ["LossScale", "plain_scaler", "read_loss_scale", "scale_numbers", "scaler_object"]

_MODULE = "deepspeed.runtime.fp16.loss_scaler"
_NUMBERS = ("cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """State of a loss scaler."""

    dynamic: bool
    """Whether it adapts."""
    cur_scale: float
    """Factor on the loss."""
    cur_iter: int = 0
    """Steps seen."""
    last_overflow_iter: int = -1
    """Step of the last overflow; -1 for none."""
    scale_factor: float = 2.0
    """Factor by which it grows and shrinks."""
    scale_window: int = 1000
    """Steps without overflow before it grows."""
    source: Stub | None = None
    """The object as the source kept it, where it kept one."""


def read_loss_scale(saved: object, config: RunConfig) -> LossScale:
    """Loss scale out of a scaler object, of the numbers of stage 0, or of the configuration when `saved` is neither."""
    if isinstance(saved, Stub) and isinstance(saved.state, dict):
        return _read(saved.state, source=saved)
    if isinstance(saved, Mapping) and "cur_scale" in saved:
        return _read(saved, source=None)
    static = config.fp16("loss_scale", 0)
    if static:
        return LossScale(dynamic=False, cur_scale=float(static))
    window = int(config.fp16("loss_scale_window", 1000))
    return LossScale(dynamic=True, cur_scale=2.0 ** config.fp16("initial_scale_power", 16), scale_window=window)


def _read(saved: Mapping[object, object], *, source: Stub | None) -> LossScale:
    def number(name: str, default: float) -> float:
        found = saved.get(name)
        return found if isinstance(found, int | float) else default

    return LossScale(
        dynamic=bool(saved.get("dynamic", saved.get("dynamic_loss_scale", False))),
        cur_scale=number("cur_scale", 1.0),
        cur_iter=int(number("cur_iter", 0)),
        last_overflow_iter=int(number("last_overflow_iter", -1)),
        scale_factor=number("scale_factor", 2.0),
        scale_window=int(number("scale_window", 1000)),
        source=source,
    )


def scale_numbers(scale: LossScale) -> dict[str, object]:
    """The numbers that stage 0 keeps (`FP16_Optimizer.state_dict`, 0.19.8)."""
    numbers: dict[str, object] = {
        "dynamic_loss_scale": scale.dynamic,
        "cur_scale": scale.cur_scale,
        "cur_iter": scale.cur_iter,
    }
    if scale.dynamic:
        numbers |= {name: getattr(scale, name) for name in _NUMBERS[1:]}
    return numbers


def scaler_object(scale: LossScale, config: RunConfig) -> Stub:
    """The scaler object of an fp16 run (`CreateLossScaler`, 0.19.8); the source's own where it kept one."""
    if scale.source is not None:
        return scale.source
    if not scale.dynamic:
        return plain_scaler(scale.cur_scale)
    hysteresis = int(config.fp16("hysteresis", 2))
    state: dict[str, object] = {
        "cur_scale": scale.cur_scale,
        "dynamic": True,
        **{name: getattr(scale, name) for name in _NUMBERS},
        "min_scale": config.fp16("min_loss_scale", 1),
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis,
        "consecutive_hysteresis": bool(config.fp16("consecutive_hysteresis", 0)),
        "raise_error_at_min_scale": True,
        "dtype": GlobalName("torch", "float16"),
    }
    return Stub(GlobalName(_MODULE, "DynamicLossScaler"), state=state, has_state=True)


def plain_scaler(scale: float = 1.0) -> Stub:
    """The scaler object of a run that does not adapt its scale; for bf16 and fp32 the scale is 1."""
    return Stub(GlobalName(_MODULE, "LossScaler"), state={"cur_scale": scale, "dynamic": False}, has_state=True)
