"""Save a run of FSDP2 under keys of the script's own, or load it by the same state dict.

torchrun --nproc-per-node 2 script_keys_worker.py --keys app --save ckpt
torchrun --nproc-per-node 3 script_keys_worker.py --keys app --load ckpt --out OUT

Rank 0 writes the full state that it has then to the folder of the checkpoint (`saved.pt`), or to OUT.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", choices=("optim", "app", "bare", "numbers"), required=True)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0 if options.save else 1)
    model = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3 if options.save else 1):
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = state_of(options.keys, model, optimizer)
    if options.save:
        dcp.save(state, checkpoint_id=options.save)
    else:
        dcp.load(state, checkpoint_id=options.load)
    values = gathered(state)
    if dist.get_rank() == 0:
        torch.save(values, options.save / "saved.pt" if options.save else options.out)
    dist.destroy_process_group()


def state_of(keys: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of a script: as torch's DCP recipe, its tutorials and its examples have it."""
    if keys == "bare":
        return model.state_dict()
    if keys == "numbers":
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}
    flat = StateDictOptions(flatten_optimizer_state_dict=keys == "app")
    names, states = get_state_dict(model, optimizer, options=flat)
    both = {"model": names, "optim": states}
    return {"app": both} if keys == "app" else both


def gathered(value: Any) -> Any:
    """The value with tensors as they are in full."""
    if isinstance(value, dict):
        return {key: gathered(own) for key, own in value.items()}
    if isinstance(value, list):
        return [gathered(own) for own in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # at times torch's own threads abort the process while Python takes it down (torch 2.13, on CPUs)
