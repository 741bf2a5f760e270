"""Two ranks of DDP that save the optimizer as it numbers its parameters: numbered_worker.py FOLDER.

FOLDER/one       all parameters in one group
FOLDER/halves    in two groups that shapes do not tell apart, loaded into another model by `ucp.load_into`
FOLDER/*.pt      the moments by name
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ucp


def halves(params: list[nn.Parameter]) -> list[Any]:
    return [{"params": params[3:]}, {"params": params[:3], "lr": 0.1}]


def make(split: Callable[[list[nn.Parameter]], list[Any]], *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5))))
    return model, torch.optim.AdamW(split(list(model.parameters())))


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[own]["exp_avg"] for name, own in model.module.named_parameters()}


def main(folder: Path) -> None:
    """Save both, and load one."""
    dist.init_process_group("gloo")
    truth: dict[str, torch.Tensor] = {}
    for name, split in {"one": list, "halves": halves}.items():
        model, optimizer = make(split, seed=0)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=folder / name)
        truth = moments(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(truth, folder / f"{name}.pt")
    model, optimizer = make(halves, seed=1)
    ucp.load_into(model, checkpoint=folder / "halves", optimizer=optimizer)
    loaded = moments(model, optimizer)
    assert all(torch.equal(loaded[name], own) for name, own in truth.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
