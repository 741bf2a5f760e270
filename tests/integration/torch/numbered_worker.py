"""Two ranks of DDP that save the optimizer as it numbers its parameters: numbered_worker.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(folder: Path) -> None:
    """Save a checkpoint, and beside it the moments by name."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5))))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "checkpoint")
    if dist.get_rank() == 0:
        moments = {name: optimizer.state[own]["exp_avg"] for name, own in model.module.named_parameters()}
        torch.save(moments, folder / "truth.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
