"""Save from a DeepSpeed engine in the background, and resume, at the same or another ZeRO stage.

torchrun --nproc-per-node 2 docs/examples/save_deepspeed.py run
"""

import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn

import ucp

folder = Path(sys.argv[1])
config = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
start = 0
if (folder / "chain.json").exists():
    start = ucp.load_into(engine, None, folder).step or 0

handle = None
for step in range(start + 1, start + 21):
    engine.backward(engine(torch.randn(16, 32)).square().mean())
    engine.step()
    if step % 10 == 0:
        path = folder / f"step{step}"
        handle = ucp.save(engine, None, None, path, step=step, chain=True, asynchronous=True)
if handle is not None:
    print(handle.wait())
