"""What a DeepSpeed configuration says about the layout of its checkpoints.

>>> config = RunConfig(raw={"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "sub_group_size": 1e6}})
>>> config.precision(()), config.sub_group_size
(<Precision.BF16: 'bf16'>, 1000000)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ucp.core.dtypes import DType

__all__ = ["Precision", "RunConfig"]

SUB_GROUP_SIZE = 1_000_000_000
"""Elements; default of `zero_optimization.sub_group_size` (runtime/zero/config.py, 0.19.8)."""

_FUSED_TYPES = ("adam", "adamw")
"""Optimizer types that the engine answers with FusedAdam unless told otherwise (`_configure_basic_optimizer`)."""


class Precision(StrEnum):
    """Type in which the model computes."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Answers from a configuration as the user wrote it; every key may be missing."""

    raw: Mapping[str, object]
    """The configuration; empty for a source that has none."""

    def precision(self, model_dtypes: Iterable[DType | None]) -> Precision:
        """Precision of the run; where the configuration is silent, what the types of the parameters show."""
        if self._section("bf16").get("enabled") is True or self._section("bfloat16").get("enabled") is True:
            return Precision.BF16
        if self._section("fp16").get("enabled") is True:
            return Precision.FP16
        seen = set(model_dtypes)
        if DType.BFLOAT16 in seen:
            return Precision.BF16
        return Precision.FP16 if DType.FLOAT16 in seen else Precision.FP32

    @property
    def zero_stage(self) -> int | None:
        """ZeRO stage that is asked for."""
        found = self._section("zero_optimization").get("stage")
        return found if isinstance(found, int) else None

    @property
    def sub_group_size(self) -> int:
        """Elements of a rank's chunks at which stage 3 closes a sub-group."""
        found = self._section("zero_optimization").get("sub_group_size")
        return int(found) if isinstance(found, int | float) and not isinstance(found, bool) else SUB_GROUP_SIZE

    @property
    def round_robin(self) -> bool:
        """Whether stages 1 and 2 deal the parameters out to the ranks."""
        return self._section("zero_optimization").get("round_robin_gradients") is True

    @property
    def parameter_alignment(self) -> bool:
        """Whether stages 1 and 2 align each parameter to 16 bytes."""
        return self._section("zero_optimization").get("parameter_alignment") is True

    @property
    def gradient_clipping(self) -> float | None:
        """Norm at which gradients are clipped, 0.0 for never; None without a configuration."""
        found = self.raw.get("gradient_clipping", 0.0)
        return float(found) if self.raw and isinstance(found, int | float) else None

    @property
    def names_fused_adam(self) -> bool:
        """Whether the configuration makes the engine build FusedAdam."""
        optimizer = self._section("optimizer")
        params = optimizer.get("params")
        torch_adam = isinstance(params, Mapping) and params.get("torch_adam") is True
        return str(optimizer.get("type", "")).lower() in _FUSED_TYPES and not torch_adam and not self.offloaded

    @property
    def names_optimizer(self) -> bool:
        """Whether the configuration, and not the training script, says which optimizer to build."""
        return bool(self._section("optimizer").get("type"))

    def uses_bf16_optimizer(self, precision: Precision) -> bool:
        """Whether stage 1 is BF16_Optimizer (`_do_optimizer_sanity_check`): it knows no reordering or alignment."""
        kept = str(self._section("data_types").get("grad_accum_dtype", "")).removeprefix("torch.")
        return precision is Precision.BF16 and kept in ("fp32", "float32") and not self.offloaded

    def fp16(self, name: str, default: float) -> float:
        """Number `name` of the `fp16` section."""
        found = self._section("fp16").get(name)
        return found if isinstance(found, int | float) else default

    def staged(self, stage: int) -> dict[str, object]:
        """The configuration with another ZeRO stage and all else kept."""
        section = {**self._section("zero_optimization"), "stage": stage}
        return {**self.raw, "zero_optimization": section}

    @property
    def offloaded(self) -> bool:
        """Whether the optimizer runs on the CPU or its states lie on NVMe."""
        zero = self._section("zero_optimization")
        offload = zero.get("offload_optimizer")
        device = offload.get("device") if isinstance(offload, Mapping) else None
        return device in ("cpu", "nvme") or zero.get("cpu_offload") is True

    def _section(self, name: str) -> Mapping[str, object]:
        found = self.raw.get(name)
        return found if isinstance(found, Mapping) else {}
