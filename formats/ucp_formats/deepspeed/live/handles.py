"""What of DeepSpeed 0.19.8 is used of a live engine, as types; DeepSpeed itself is never imported for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

__all__ = [
    "Bf16Optimizer",
    "Engine",
    "ExpertParam",
    "Fp16Optimizer",
    "LossScaleConfig",
    "PartitionedParam",
    "Scheduler",
    "Stage3Optimizer",
    "UnfusedOptimizer",
    "Wrapper",
    "ZeroOptimizer",
]


class Scheduler(Protocol):
    """A learning-rate schedule."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from `state`."""


class Engine(Protocol):
    """DeepSpeedEngine (runtime/engine.py)."""

    module: nn.Module
    optimizer: object
    lr_scheduler: Scheduler | None
    global_steps: int
    global_samples: int
    skipped_steps: int
    mpu: object
    expert_parallel_group: Mapping[str, ProcessGroup]

    def train_batch_size(self) -> int:
        """Samples of a step, of all ranks."""


class Wrapper(Protocol):
    """What all optimizers that DeepSpeed wraps around another have."""

    optimizer: Optimizer


class ZeroOptimizer(Wrapper, Protocol):
    """DeepSpeedZeroOptimizer, stages 1 and 2 (runtime/zero/stage_1_and_2.py)."""

    bit16_groups: Sequence[Sequence[nn.Parameter]]
    round_robin_bit16_groups: Sequence[Sequence[nn.Parameter]]
    round_robin_bit16_offsets: Sequence[Sequence[int]]
    params_in_partition: Sequence[Sequence[nn.Parameter]]
    single_partition_of_fp32_groups: Sequence[torch.Tensor]
    real_dp_process_group: Sequence[ProcessGroup]

    def update_lp_params(self) -> None:
        """Make the 16-bit weights of all ranks from the masters. Collective."""


class Bf16Optimizer(Wrapper, Protocol):
    """BF16_Optimizer (runtime/bf16_optimizer.py)."""

    bf16_groups: Sequence[Sequence[nn.Parameter]]
    fp32_groups_flat_partition: Sequence[torch.Tensor]
    real_dp_process_group: Sequence[ProcessGroup]

    def update_lp_params(self) -> None:
        """Make the 16-bit weights of all ranks from the masters. Collective."""


class Fp16Optimizer(Wrapper, Protocol):
    """FP16_Optimizer (runtime/fp16/fused_optimizer.py)."""

    fp16_groups: Sequence[Sequence[nn.Parameter]]
    fp32_groups_flat: Sequence[torch.Tensor]


class UnfusedOptimizer(Wrapper, Protocol):
    """FP16_UnfusedOptimizer (runtime/fp16/unfused_optimizer.py)."""

    fp16_groups: Sequence[Sequence[nn.Parameter]]
    fp32_groups: Sequence[Sequence[torch.Tensor]]


class ExpertParam(Protocol):
    """A parameter of an expert (moe/experts.py)."""

    group_name: str


class PartitionedParam(Protocol):
    """A parameter that stage 3 has cut (runtime/zero/partition_parameters.py)."""

    ds_shape: torch.Size
    ds_numel: int
    ds_tensor: torch.Tensor
    ds_process_group: ProcessGroup

    def partition_numel(self) -> int:
        """Elements of a chunk, padding counted."""


class Stage3Optimizer(Wrapper, Protocol):
    """DeepSpeedZeroOptimizer_Stage3 (runtime/zero/stage3.py)."""

    fp16_groups: Sequence[Sequence[nn.Parameter]]
    fp16_partitioned_groups_flat: Sequence[torch.Tensor]
    fp32_partitioned_groups_flat: Sequence[torch.Tensor]
    sub_group_process_groups: Sequence[ProcessGroup]
    sub_group_to_group_id: Mapping[int, int]

    def checkpoint_event_prologue(self) -> None:
        """Release the weights that are gathered."""

    def checkpoint_event_epilogue(self) -> None:
        """Gather those that are kept whole (persistent parameters). Collective."""


class LossScaleConfig(Protocol):
    """Loss scale without ZeRO (runtime/fp16/loss_scaler.py)."""

    use_grad_scaling: bool
    dynamic_loss_scale: bool
    cur_scale: float
    cur_iter: int
    last_overflow_iter: int | None
    scale_factor: float | None
    scale_window: int | None
