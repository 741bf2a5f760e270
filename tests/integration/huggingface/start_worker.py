"""One rank of a run that starts from a model of Hugging Face, as published or as `ucp convert` wrote it; prints JSON.

    torchrun --nproc-per-node 2 start_worker.py published MODEL OUT --stage 1
    torchrun --nproc-per-node 2 start_worker.py deepspeed MODEL OUT --stage 1 --checkpoint CONVERTED [--universal]
    torchrun --nproc-per-node 2 start_worker.py dcp MODEL OUT --checkpoint CONVERTED

`published` loads the weights with from_pretrained, under a new optimizer. The others make the model with other weights
and the optimizer with another rate, so that what the checkpoint does not restore, shows. Rank 0 writes the losses of
three steps, and the rate, to OUT.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

LR = 0.01
"""Rate of the run; what `--set lr` says."""
STEPS = 3


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("start", choices=["published", "deepspeed", "dcp"])
    arguments.add_argument("model", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--stage", type=int)
    arguments.add_argument("--checkpoint", type=Path)
    arguments.add_argument("--universal", action="store_true")
    asked = arguments.parse_args()
    torch.manual_seed(3)
    if asked.start == "published":
        model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="auto")
    else:
        config = AutoConfig.from_pretrained(asked.model)
        model = AutoModelForCausalLM.from_config(config).to(config.dtype)
    model.eval()  # no dropout
    rate = LR if asked.start == "published" else 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    told = with_torch(asked, model, optimizer) if asked.stage is None else with_deepspeed(asked, model, optimizer)
    if os.environ["RANK"] == "0":
        asked.out.write_text(json.dumps(told))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # at times torch's own threads abort the process while Python takes it down (torch 2.13, on CPUs)


def batches() -> torch.Tensor:
    every = torch.randint(0, 32, (STEPS, 2, 8), generator=torch.Generator().manual_seed(5))
    return every[:, int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]


def with_deepspeed(
    asked: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, object]:
    import deepspeed

    half = next(model.parameters()).dtype is torch.bfloat16
    config = {
        "train_micro_batch_size_per_gpu": 2 // int(os.environ["WORLD_SIZE"]),
        "zero_optimization": {"stage": asked.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": half},
        "checkpoint": {"load_universal": asked.universal},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)
    if asked.checkpoint is not None:
        folder, _ = engine.load_checkpoint(str(asked.checkpoint))
        assert folder is not None
    losses = []
    for ids in batches():
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    return {"losses": losses, "lr": engine.optimizer.param_groups[0]["lr"], "steps": engine.global_steps}


def with_torch(
    asked: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, object]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=optimizer.param_groups[0]["lr"])
    if asked.checkpoint is not None:
        states, own = get_state_dict(model, optimizer)
        dcp.load({"model": states, "optimizer": own}, checkpoint_id=asked.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=own)
    losses = []
    for ids in batches():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return {"losses": losses, "lr": optimizer.param_groups[0]["lr"]}


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


if __name__ == "__main__":
    main()
