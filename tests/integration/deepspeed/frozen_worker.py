"""A real engine of DeepSpeed, with a frozen parameter, loads what ucp wrote: frozen_worker.py CHECKPOINT STAGE OUT.

It has all parameters in its optimizer, as `AdamW(model.parameters())`, of which DeepSpeed leaves frozen ones out.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

FROZEN = "2.weight"


def make_model() -> nn.Module:
    """Four equal layers, of which a matrix is frozen."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model.get_parameter(FROZEN).requires_grad = False
    return model


def main(checkpoint: str, stage: int, out: str) -> None:
    """Load, save again, and step once."""
    torch.manual_seed(7)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    path, _ = engine.load_checkpoint(checkpoint)
    assert path is not None
    engine.save_checkpoint(out)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
