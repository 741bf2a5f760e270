"""Load a checkpoint into FSDP2 with tensor parallelism, and say what each rank read of it.

torchrun --nproc-per-node 4 reads_worker.py --case fsdp2-dp2-tp2 --checkpoint DIR --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "fixtures" / "make" / "torch"))

from torch_cases import CASES
from torch_train import Run


class Counting(dcp.DefaultLoadPlanner):
    """Keeps what the plan reads: key, chunk it is read from, and the part of the chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[dict[str, Any]] = []

    def create_local_plan(self) -> dcp.LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        for item in plan.items:
            saved = self.metadata.state_dict_metadata[item.storage_index.fqn]
            if hasattr(saved, "chunks") and len(saved.size) > 0:
                (chunk,) = [own for own in saved.chunks if own.offsets == item.storage_index.offset]
                whole = tuple(item.lengths) == tuple(chunk.sizes)
                file = self.metadata.storage_data[item.storage_index].relative_path
                self.read.append({"key": item.storage_index.fqn, "whole": whole, "file": file})
        return plan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run = Run(CASES[options.case], seed=1)
    state = {key: own for key, own in run.state().items() if key in ("model", "optimizer")}
    planner = Counting()
    dcp.load(state, checkpoint_id=str(options.checkpoint), planner=planner)
    options.out.mkdir(parents=True, exist_ok=True)
    cut = {key: len(own.placements) for key, own in state["model"].items() if hasattr(own, "placements")}
    report = {"read": planner.read, "tensors": len(cut), "two_dims": sum(n > 1 for n in cut.values())}
    (options.out / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
