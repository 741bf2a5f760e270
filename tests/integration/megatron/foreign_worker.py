"""Load what was made of another framework's checkpoint with real DeepSpeed, take a step, and say how both went.

    torchrun --nproc-per-node 2 tests/integration/megatron/foreign_worker.py JOBS.json OUT.json

A job is one fresh engine around parameters of the names and shapes of the truth, all of another value. Every element's
gradient is 0.5, so that the step is Adam's by hand: what the moments and masters have to be after it follows from the
truth, and the weights show which step was counted.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

_FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
sys.path.insert(0, str(_FIXTURES / "make" / "deepspeed"))

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam  # noqa: E402
from deepspeed_truth import gather  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

GRADIENT = 0.5
"""Of every element; the same in every type."""
OPTIMIZERS = {"torch": torch.optim.AdamW, "cpu": DeepSpeedCPUAdam, "fused": FusedAdam}


class Named(nn.Module):
    """Parameters under the names of another framework, whose sum is the loss."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        self.names = list(shapes)
        for name, shape in shapes.items():
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in owner._modules:  # getattr finds methods too
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(torch.full(shape, 3.0)))

    def forward(self) -> Tensor:
        """Half the sum of all elements."""
        return torch.stack([self.get_parameter(name).sum() * GRADIENT for name in self.names]).sum()


def main() -> None:
    """Carry out all jobs of the file."""
    deepspeed.init_distributed("gloo")
    reports = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        reports.append(_carried_out(job))
        gc.collect()
        deepspeed.comm.barrier()
    if deepspeed.comm.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(reports, indent=1))
    deepspeed.comm.barrier()
    os._exit(0)  # the threads of DeepSpeed's shared-memory communicator sometimes abort a normal exit


def _carried_out(job: dict[str, Any]) -> dict[str, Any]:
    truth = load_file(job["truth"])
    engine = _engine(job, truth)
    report: dict[str, Any] = {"error": "", "wrong": [], "compared": 0, "after": []}
    try:
        path, _ = engine.load_checkpoint(job["checkpoint"])
        if path is None:
            raise FileNotFoundError(job["checkpoint"])
        found = gather(engine)
        wanted = {key: own for key, own in truth.items() if not key.endswith("/model")}
        report["wrong"] = [key for key, own in wanted.items() if not torch.equal(found.tensors[key], own)]
        report["compared"] = len(wanted)
        report["steps"] = [group.step for group in found.groups]
        report["rates"] = [group.hyperparameters["lr"] for group in found.groups]
        if job["mended"]:
            for state in engine.optimizer.optimizer.state.values():
                state["step"] = state["step"].clone()
        loss = engine()
        engine.backward(loss)
        engine.step()
        report["loss"] = float(loss)
        after = gather(engine)
        report["steps_after"] = [group.step for group in after.groups]
        report["after"] = _misstepped(job, truth, after.tensors)
    except Exception as error:  # noqa: BLE001  # a refusal by DeepSpeed is a result
        report["error"] = f"{type(error).__name__}: {error}"
    engine.destroy()
    return report


def _engine(job: dict[str, Any], truth: dict[str, Tensor]) -> Any:
    names = [name for group in job["groups"] for name in group["names"]]
    model = Named({name: truth[f"{name}/weight"].shape for name in names})
    groups = [
        {"params": [model.get_parameter(name) for name in group["names"]], "weight_decay": group["weight_decay"]}
        for group in job["groups"]
    ]
    optimizer = OPTIMIZERS[job["optimizer"]](groups, lr=9.0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": job["stage"]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }
    if job["optimizer"] == "cpu":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if job["universal"]:
        config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _misstepped(job: dict[str, Any], truth: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """States that are not what AdamW makes of the truth in step `job["step"] + 1`."""
    wrong = []
    first, second = job["betas"]
    step = job["step"] + 1
    for group in job["groups"]:
        for name in group["names"]:
            own = {state: truth[f"{name}/{state}"] for state in ("weight", "exp_avg", "exp_avg_sq")}
            mean = own["exp_avg"] * first + (1 - first) * GRADIENT
            square = own["exp_avg_sq"] * second + (1 - second) * GRADIENT**2
            size = square.sqrt() / math.sqrt(1 - second**step) + job["eps"]
            weight = own["weight"] * (1 - job["lr"] * group["weight_decay"])
            weight = weight - job["lr"] / (1 - first**step) * mean / size
            expected = {"weight": weight, "exp_avg": mean, "exp_avg_sq": square}
            wrong += [
                f"{name}/{state}"
                for state, tensor in expected.items()
                if not torch.allclose(after[f"{name}/{state}"], tensor, rtol=2e-6, atol=2e-8)
            ]
    return wrong


if __name__ == "__main__":
    main()
