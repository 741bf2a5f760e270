"""Save a model that DTensors cut over tensor-parallel ranks, and resume, at the same or another degree.

torchrun --nproc-per-node 2 docs/examples/save_tensor_parallel.py run
"""

import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ucp

folder = Path(sys.argv[1])
distributed.init_process_group("gloo")
torch.manual_seed(0)  # the same data on all ranks
mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # parameters of different placements
topology = f"tp={mesh.size()}"
start = 0
if (folder / "chain.json").exists():
    start = ucp.load_into(model, topology, folder, optimizer=optimizer).step or 0

for step in range(start + 1, start + 21):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(ucp.save(model, optimizer, topology, folder / f"step{step}", step=step, chain=True))
distributed.destroy_process_group()
