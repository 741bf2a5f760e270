"""Workers of Ray Train that fail once, start again, and are followed by others: ray_train_worker.py FOLDER.

FOLDER/losses.json has the losses of steps 4 to 6: of plain torch, of two workers over FSDP2 that failed at step 5 and
resumed from what they had reported at step 3, and of three workers over DDP that were given that checkpoint. It also
has the step that each of them resumed at.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROWS, SAVED, FAILS, STEPS = 12, 3, 5, 6


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model: nn.Module, step: int, rank: int = 0, ranks: int = 1) -> torch.Tensor:
    rows = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(step))
    return model(rows.chunk(ranks)[rank]).square().mean()


def train_plainly() -> list[float]:
    model, losses = make(0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, STEPS + 1):
        loss = loss_of(model, step)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[SAVED:]


def work(config: dict[str, Any]) -> None:
    """What a worker does."""
    from ucp.integrations.ray_train import resume

    rank, ranks, folder = dist.get_rank(), dist.get_world_size(), Path(config["folder"])
    has_failed = folder / "failed"
    model = make(0 if config["sharded"] and not has_failed.exists() else 1)
    if config["sharded"]:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",)))
    else:
        model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    report = resume(model, optimizer, config["checkpoint"])
    start, losses = report.step if report else 0, []
    for step in range(start + 1, STEPS + 1):
        if config["sharded"] and step == FAILS and not has_failed.exists():
            dist.barrier()
            has_failed.touch()
            raise RuntimeError("this worker fails")
        loss = loss_of(model, step, rank, ranks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        with tempfile.TemporaryDirectory() as saved:
            checkpoint = None
            if config["sharded"] and step == SAVED:
                weights, states = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": states}, checkpoint_id=saved)
                checkpoint = ray.train.Checkpoint.from_directory(saved)
            ray.train.report({"loss": losses[-1]}, checkpoint=checkpoint)
    if rank == 0:
        (folder / config["name"]).write_text(json.dumps({"start": start, "losses": losses}))


def train(folder: Path, name: str, workers: int, *, sharded: bool, checkpoint: str | None) -> ray.train.Result:
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": str(folder), "name": name, "sharded": sharded, "checkpoint": checkpoint},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.1}),
        run_config=RunConfig(
            name=name, storage_path=str(folder / "runs"), failure_config=FailureConfig(max_failures=1)
        ),
    )
    return trainer.fit()


def main(folder: Path) -> None:
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    first = train(folder, "restarted", 2, sharded=True, checkpoint=None)
    train(folder, "others", 3, sharded=False, checkpoint=first.checkpoint.path)
    reports = {name: json.loads((folder / name).read_text()) for name in ("restarted", "others")}
    plain = {"start": SAVED, "losses": train_plainly()}
    (folder / "losses.json").write_text(json.dumps({"plain": plain, **reports}))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
