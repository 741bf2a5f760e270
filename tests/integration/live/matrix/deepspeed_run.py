"""The reference model under DeepSpeed ZeRO-3, in fp32 with torch's AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.integration.live.matrix.torch_run import started
from tests.integration.live.reference.run import ADAM, named_groups
from tests.integration.live.reference.sizes import ROWS, Sizes, tokens


class DeepSpeedRun:
    """An engine on this rank. Collective."""

    def __init__(self, sizes: Sizes, stage: int, *, seed: str = "", lr: float | None = None) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        model = started(sizes, seed)
        groups = named_groups(list(model.named_parameters()))
        optimizer = torch.optim.AdamW(groups, **ADAM | {"lr": lr or sizes.lr})
        config = {
            "train_batch_size": ROWS,
            "train_micro_batch_size_per_gpu": ROWS // self.ranks,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        deepspeed.init_distributed("gloo")
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's."""
        return self.model.optimizer

    def step(self, at: int) -> float:
        """Take a step; the mean loss of the global batch before it."""
        rows = tokens(at).chunk(self.ranks)[self.rank]
        loss = cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        self.model.backward(loss)
        self.model.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / self.ranks

    def save(self, folder: Path, step: int) -> None:
        """As DeepSpeed's engine does."""
        self.model.save_checkpoint(str(folder), tag=f"global_step{step}")

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Name, state and whole tensor, gathered by DeepSpeed; `module` is the weight that the model computes with."""
        for name, param in self.model.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                yield name, "module", param.detach().clone()
            yield name, "weight", safe_get_full_fp32_param(param)
            for state in ("exp_avg", "exp_avg_sq"):
                yield name, state, safe_get_full_optimizer_state(param, state)

    def steps(self) -> set[float]:
        """What the optimizer counts."""
        return {float(own["step"]) for own in self.optimizer.optimizer.state.values() if "step" in own}

    def expected(self, name: str, state: str, whole: dict[str, dict[str, Tensor]]) -> Tensor:
        """What `states` should give."""
        return whole["weight" if state == "module" else state][name]
