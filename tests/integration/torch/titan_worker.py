"""Train with torchtitan's optimizers, schedulers and CheckpointManager over FSDP2; save at step 3, or go on from there.

torchrun --nproc-per-node 2 titan_worker.py --out OUT              # OUT/checkpoint/step-3, losses of steps 4 to 6
torchrun --nproc-per-node 3 titan_worker.py --out AGAIN --resume   # from AGAIN/checkpoint/step-3
UCP_CHECKPOINT=ckpt torchrun --nproc-per-node 3 titan_worker.py --out AGAIN --resume --hook

With --hook the checkpoint is loaded by `ucp.integrations.torchtitan`: that of --initial, or of UCP_CHECKPOINT.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

ROWS = 12


class TrainState:
    """Steps done, as torchtitan's trainer keeps them."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32), "ntokens_seen": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--hook", action="store_true")
    parser.add_argument("--initial", help="with --hook: where to start from")
    options = parser.parse_args()
    kind = CheckpointManager
    if options.hook:
        from ucp.integrations.torchtitan import ResumingManager

        kind = ResumingManager
    dist.init_process_group("gloo")
    torch.manual_seed(int(options.resume))
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",)))
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=6)
    progress = TrainState()
    config = kind.Config(enable=True, interval=3, last_save_model_only=False, keep_latest_k=0)
    config.initial_load_path, config.initial_load_model_only = options.initial, False
    manager = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(options.out),
    )
    assert manager.load() is options.resume
    losses = []
    while progress.step < 6:
        progress.step += 1
        rows = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(progress.step))
        loss = model(rows.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
        loss.backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
        if progress.step == 3:
            manager.save(progress.step)
    if dist.get_rank() == 0:
        lr = next(iter(optimizers)).param_groups[0]["lr"]
        (options.out / "report.json").write_text(json.dumps({"losses": losses[-3:], "lr": lr}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
