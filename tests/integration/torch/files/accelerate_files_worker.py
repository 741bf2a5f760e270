"""What accelerate saves of a model under FSDP, for `test_accelerate_files.py`, under torchrun.

accelerate_files.py OUT      OUT/<way>/ for each way of saving, and OUT/truth.safetensors
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import fsdp_utils
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WAYS = {
    "local-1": (1, "LOCAL_STATE_DICT"),
    "local-orig-1": (1, "LOCAL_STATE_DICT"),
    "ranks-2": (2, "SHARDED_STATE_DICT"),
    "full-2": (2, "FULL_STATE_DICT"),
}
"""Way to the version of FSDP and the kind of state dict; `orig`: with `use_orig_params`."""


class Block(nn.Module):
    """A wrapped module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        out: torch.Tensor = self.b(self.norm(self.a(x)))
        return out


def trained(version: int, *, is_orig: bool) -> tuple[Any, Any]:
    """A model after two steps, and its optimizer."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 5), Block(), Block(), nn.Linear(5, 3))
    if version == 2:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (model[1], model[2], model):
            fully_shard(module, mesh=mesh)
    else:
        wrapping = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(model, use_orig_params=is_orig, **wrapping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(torch.full((2, 4), float(step + 1))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def main(out: Path) -> None:
    """Save in every way."""
    dist.init_process_group("gloo")
    for way, (version, kind) in WAYS.items():
        model, optimizer = trained(version, is_orig="orig" in way)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
        accelerator = Accelerator(cpu=True)
        known = {"use_dcp": False}
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(out / way), **known)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(out / way), **known)
        if version == 2:
            whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        tensors = {f"{name}/weight": own.detach().clone() for name, own in whole[0].items()}
        for name, states in whole[1]["state"].items():
            tensors |= {f"{name}/{key}": own.detach().clone() for key, own in states.items()}
        save_file(tensors, out / "truth.safetensors")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
