"""Save from FSDP2 in the background, and resume, with the same or another number of ranks.

torchrun --nproc-per-node 2 docs/examples/save_fsdp2.py run
"""

import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ucp

folder = Path(sys.argv[1])
distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
start = 0
if (folder / "chain.json").exists():
    start = ucp.load_into(model, None, folder, optimizer=optimizer).step or 0

handle = None
for step in range(start + 1, start + 21):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:  # every rank writes its shards
        path = folder / f"step{step}"
        handle = ucp.save(model, optimizer, None, path, step=step, chain=True, asynchronous=True)
if handle is not None:
    print(handle.wait())
distributed.destroy_process_group()
