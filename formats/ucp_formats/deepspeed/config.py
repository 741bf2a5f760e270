"""The DeepSpeed configuration of a run, as far as it decides the layout of checkpoints, and the fp16 loss scale.

DeepSpeed's loss scaler counts iterations (runtime/fp16/loss_scaler.py and fused_optimizer.py, 0.19.8). Stages 1 to 3
pickle the scaler object; stage 0 writes its numbers beside the optimizer's state dict. Both forms are read and written
here, so that a run keeps its loss scale, and its count of steps without overflow, when the stage changes.

>>> config = RunConfig(raw={"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "sub_group_size": 1e6}})
>>> config.precision(()), config.sub_group_size
(<Precision.BF16: 'bf16'>, 1000000)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ucp.contract.run_extras import LossScale
from ucp.core.index import Index
from ucp.core.tensor import DType
from ucp.io.pickle.values import GlobalName, Stub

SUB_GROUP_SIZE = 1_000_000_000
"""Elements; default of `zero_optimization.sub_group_size` (runtime/zero/config.py, 0.19.8)."""

_FUSED_TYPES = ("adam", "adamw")
"""Optimizer types for which the engine builds FusedAdam by default (`_configure_basic_optimizer`)."""


class Precision(StrEnum):
    """Dtype in which the model computes."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Values of a configuration as the user wrote it; every key may be missing."""

    raw: Mapping[str, object]
    """The configuration; empty for a source without one."""

    def precision(self, model_dtypes: Iterable[DType | None]) -> Precision:
        """Precision that the configuration enables; if it enables none, that of the model's dtypes."""
        if self._section("bf16").get("enabled") is True or self._section("bfloat16").get("enabled") is True:
            return Precision.BF16
        if self._section("fp16").get("enabled") is True:
            return Precision.FP16
        dtypes = set(model_dtypes)
        if DType.BFLOAT16 in dtypes:
            return Precision.BF16
        return Precision.FP16 if DType.FLOAT16 in dtypes else Precision.FP32

    @property
    def zero_stage(self) -> int | None:
        """Configured ZeRO stage."""
        stage = self._zero.get("stage")
        return stage if isinstance(stage, int) else None

    @property
    def sub_group_size(self) -> int:
        """Elements per rank at which stage 3 closes a sub-group."""
        size = self._zero.get("sub_group_size")
        return int(size) if isinstance(size, int | float) and not isinstance(size, bool) else SUB_GROUP_SIZE

    @property
    def round_robin(self) -> bool:
        """Whether stages 1 and 2 assign the parameters to the ranks in turn."""
        return self._zero.get("round_robin_gradients") is True

    @property
    def parameter_alignment(self) -> bool:
        """Whether stages 1 and 2 align each parameter to 16 bytes."""
        return self._zero.get("parameter_alignment") is True

    @property
    def groups_experts(self) -> bool:
        """Whether data-parallel ranks with the same experts are adjacent."""
        return self.raw.get("use_data_before_expert_parallelism") is True

    @property
    def gradient_clipping(self) -> float | None:
        """Norm at which gradients are clipped, 0.0 for never; None without a configuration."""
        norm = self.raw.get("gradient_clipping", 0.0)
        return float(norm) if self.raw and isinstance(norm, int | float) else None

    @property
    def names_fused_adam(self) -> bool:
        """Whether the engine builds FusedAdam because of this configuration."""
        optimizer = self._section("optimizer")
        params = optimizer.get("params")
        torch_adam = isinstance(params, Mapping) and params.get("torch_adam") is True
        return str(optimizer.get("type", "")).lower() in _FUSED_TYPES and not torch_adam and not self.offloaded

    @property
    def names_optimizer(self) -> bool:
        """Whether the configuration, and not the training script, chooses the optimizer."""
        return bool(self._section("optimizer").get("type"))

    def uses_bf16_optimizer(self, precision: Precision) -> bool:
        """Whether stage 1 uses BF16_Optimizer (`_do_optimizer_sanity_check`), which never reorders or aligns params."""
        dtype = str(self._section("data_types").get("grad_accum_dtype", "")).removeprefix("torch.")
        return precision is Precision.BF16 and dtype in ("fp32", "float32") and not self.offloaded

    def fp16(self, name: str, default: float) -> float:
        """Number `name` of the section `fp16`, or `default` if the section has no such number."""
        number = self._section("fp16").get(name)
        return number if isinstance(number, int | float) else default

    def with_stage(self, stage: int) -> dict[str, object]:
        """The configuration with another ZeRO stage."""
        return {**self.raw, "zero_optimization": {**self._zero, "stage": stage}}

    @property
    def offloaded(self) -> bool:
        """Whether optimizer states are offloaded to the CPU or to NVMe."""
        offload = self._zero.get("offload_optimizer")
        device = offload.get("device") if isinstance(offload, Mapping) else None
        return device in ("cpu", "nvme") or self._zero.get("cpu_offload") is True

    @property
    def _zero(self) -> Mapping[str, object]:
        return self._section("zero_optimization")

    def _section(self, name: str) -> Mapping[str, object]:
        section = self.raw.get(name)
        return section if isinstance(section, Mapping) else {}


_MODULE = "deepspeed.runtime.fp16.loss_scaler"
_COUNTS = {"cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000}
"""Fields of a dynamic scaler, each with its initial value."""


def read_loss_scale(saved: object, config: RunConfig) -> dict[str, object]:
    """The state of the loss scaler, by DeepSpeed's field names: whether it is `dynamic`, and its numbers.

    `saved`: a scaler object, or the numbers that stage 0 saves; for anything else, `config` gives the initial state.
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
    """The numbers that stage 0 saves (`FP16_Optimizer.state_dict`, 0.19.8)."""
    names = ("cur_scale", *_COUNTS) if scale["dynamic"] else ("cur_scale", "cur_iter")
    return {"dynamic_loss_scale": scale["dynamic"], **{name: scale[name] for name in names}}


def scaler_object(saved: object, config: RunConfig) -> Stub:
    """The scaler object of an fp16 run (`CreateLossScaler`, 0.19.8): the one that the source saved, or a new one."""
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
    """The scaler object of a run with a static loss scale; 1 for bf16 and fp32."""
    return Stub(GlobalName(_MODULE, "LossScaler"), state={"cur_scale": scale, "dynamic": False}, has_state=True)


def deepspeed_scale(index: Index) -> LossScale | None:
    """The dynamic loss scale of a DeepSpeed source in the fields of `torch.amp.GradScaler`; None if it has none."""
    for extra in index.extras:
        if extra.name == "loss_scaler" and extra.rank is None:
            state = extra.value.state if isinstance(extra.value, Stub) else extra.value
            if isinstance(state, dict) and (state.get("dynamic") or state.get("dynamic_loss_scale")):
                current, last, window = (state.get(key) for key in ("cur_iter", "last_overflow_iter", "scale_window"))
                steps = None
                if isinstance(current, int) and isinstance(last, int) and isinstance(window, int):
                    # a scaler without ZeRO (saved as numbers) grows for the first time one step later
                    steps = max(current - last - 1 - (not isinstance(extra.value, Stub)), 0) % window
                factor = state.get("scale_factor")
                return LossScale(
                    found_in="loss_scaler",
                    scale=state.get("cur_scale"),
                    growth_factor=factor,
                    backoff_factor=1 / factor if isinstance(factor, float) and factor else None,
                    growth_interval=window,
                    growth_tracker=steps,
                )
    return None
