"""What torch.distributed.checkpoint has for the same jobs, each a command of its own.

python -m tests.bench.torch_ways merge SRC DST         every folder of items to one file (`format_utils.dcp_to_torch`)
python -m tests.bench.torch_ways huggingface SRC DST   weights, loaded, and saved with `HuggingFaceStorageWriter`
python -m tests.bench.torch_ways copy SRC DST          loaded and saved
python -m tests.bench.torch_ways small DST             makes a checkpoint of `SMALL` tensors of 16 KiB, and steps
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

SMALL = 20_000


def merge(src: Path, dst: Path) -> None:
    dst.mkdir()
    for own in sorted(src.glob("**/.metadata")):
        dcp_to_torch_save(own.parent, dst / f"{own.parent.name}.pt")


def huggingface(src: Path, dst: Path) -> None:
    state = loaded(src / "pytorch_model_fsdp_0")["model"]
    writer = dcp.HuggingFaceStorageWriter(
        str(dst), fqn_to_index_mapping=dict.fromkeys(state, 1), save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer, no_dist=True)


def copy(src: Path, dst: Path) -> None:
    dcp.save(loaded(src), checkpoint_id=dst, no_dist=True)


def loaded(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """All that a folder of items holds, nested as it was saved."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    reader = dcp.FileSystemReader(folder)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def small(dst: Path) -> None:
    names = [f"layers.{at}.weight" for at in range(-(-SMALL // len(("weight", "exp_avg", "exp_avg_sq"))))]
    weights = {name: torch.randn(64, 64) for name in names}
    states = {
        name: {"exp_avg": torch.randn(64, 64), "exp_avg_sq": torch.randn(64, 64), "step": torch.tensor(1.0)}
        for name in names
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": names}]
    state = {"model": weights, "optimizer": {"state": states, "param_groups": groups}}
    dcp.save(state, checkpoint_id=dst / "checkpoint", no_dist=True)


if __name__ == "__main__":
    {"merge": merge, "huggingface": huggingface, "copy": copy, "small": small}[sys.argv[1]](*map(Path, sys.argv[2:]))
