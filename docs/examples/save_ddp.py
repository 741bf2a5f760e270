"""Save from DistributedDataParallel (or one process) in the background, and resume.

torchrun --nproc-per-node 2 docs/examples/save_ddp.py run
"""

import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import ucp

folder = Path(sys.argv[1])
distributed.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
start = 0
if (folder / "chain.json").exists():  # the newest save that is whole
    report = ucp.load_into(model, None, folder, optimizer=optimizer, scheduler=scheduler, rank_extras="carry")
    start = report.step or 0

handle = None
for step in range(start + 1, start + 21):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step % 10 == 0:  # waits for the save before it, if that is still being written
        path = folder / f"step{step}"
        handle = ucp.save(
            model, optimizer, None, path, step=step, scheduler=scheduler, chain=True, keep=2, asynchronous=True
        )
if handle is not None:
    print(handle.wait())  # before the program ends
distributed.destroy_process_group()
