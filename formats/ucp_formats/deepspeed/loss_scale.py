"""The loss scale of an fp16 run, as DeepSpeed counts it: by iterations.

Source: runtime/fp16/loss_scaler.py and fused_optimizer.py, 0.19.8. Stages 1 to 3 pickle the scaler object itself; stage
0 writes its numbers beside the optimizer. Both are read and made here, so that a run keeps its scale, and its count of
steps without overflow, across stages.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucp.contract.run_extras import LossScale
from ucp.core.index import Index
from ucp.core.pickle_values import GlobalName, Stub
from ucp_formats.deepspeed.config import RunConfig

__all__ = ["deepspeed_scale", "plain_scaler", "read_loss_scale", "scale_numbers", "scaler_object"]

_MODULE = "deepspeed.runtime.fp16.loss_scaler"
_COUNTS = {"cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000}
"""Number of a dynamic scaler to its value at the start."""


def read_loss_scale(saved: object, config: RunConfig) -> dict[str, object]:
    """Numbers of a scaler by DeepSpeed's names, with `dynamic`.

    They are those of a scaler object, those that stage 0 keeps, or those of the configuration if `saved` is neither.
    """
    state = saved.state if isinstance(saved, Stub) else saved
    if isinstance(state, Mapping) and (isinstance(saved, Stub) or "cur_scale" in state):
        dynamic = bool(state.get("dynamic", state.get("dynamic_loss_scale", False)))
        numbers: dict[str, object] = {"dynamic": dynamic}
        for name, default in {"cur_scale": 1.0, **_COUNTS}.items():
            number = state.get(name)
            number = number if isinstance(number, int | float) else default
            numbers[name] = int(number) if isinstance(default, int) else number
        return numbers
    static = config.fp16("loss_scale", 0)
    if static:
        return {"dynamic": False, "cur_scale": float(static), **_COUNTS}
    window = int(config.fp16("loss_scale_window", 1000))
    scale = 2.0 ** config.fp16("initial_scale_power", 16)
    return {"dynamic": True, "cur_scale": scale, **_COUNTS, "scale_window": window}


def scale_numbers(scale: Mapping[str, object]) -> dict[str, object]:
    """The numbers that stage 0 keeps (`FP16_Optimizer.state_dict`, 0.19.8)."""
    names = ("cur_scale", *_COUNTS) if scale["dynamic"] else ("cur_scale", "cur_iter")
    return {"dynamic_loss_scale": scale["dynamic"], **{name: scale[name] for name in names}}


def scaler_object(saved: object, config: RunConfig) -> Stub:
    """The scaler object of an fp16 run (`CreateLossScaler`, 0.19.8); the source's own where it kept one."""
    if isinstance(saved, Stub) and isinstance(saved.state, dict):
        return saved
    scale = read_loss_scale(saved, config)
    if not scale["dynamic"]:
        return plain_scaler(scale["cur_scale"])
    hysteresis = int(config.fp16("hysteresis", 2))
    state: dict[str, object] = {
        "cur_scale": scale["cur_scale"],
        "dynamic": True,
        **{name: scale[name] for name in _COUNTS},
        "min_scale": config.fp16("min_loss_scale", 1),
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis,
        "consecutive_hysteresis": bool(config.fp16("consecutive_hysteresis", 0)),
        "raise_error_at_min_scale": True,
        "dtype": GlobalName("torch", "float16"),
    }
    return Stub(GlobalName(_MODULE, "DynamicLossScaler"), state=state, has_state=True)


def plain_scaler(scale: object = 1.0) -> Stub:
    """The scaler object of a run that does not adapt its scale; for bf16 and fp32 the scale is 1."""
    return Stub(GlobalName(_MODULE, "LossScaler"), state={"cur_scale": scale, "dynamic": False}, has_state=True)


def deepspeed_scale(index: Index) -> LossScale | None:
    """The scale as `torch.amp.GradScaler` counts it, where it adapts itself."""
    for extra in index.extras:
        if extra.name == "loss_scaler" and extra.rank is None:
            state = extra.value.state if isinstance(extra.value, Stub) else extra.value
            if isinstance(state, dict) and (state.get("dynamic") or state.get("dynamic_loss_scale")):
                return _torch_counts(state, grows_late=not isinstance(extra.value, Stub))
    return None


def _torch_counts(state: dict[object, object], *, grows_late: bool) -> LossScale:
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
