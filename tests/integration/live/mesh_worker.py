"""One rank of `test_load_mesh.py`: plain modules of local shapes on a DeviceMesh of torch whose order is its own.

torchrun --nproc-per-node 4 mesh_worker.py CHECKPOINT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.unit.live.cluster import STATES, Place, Saved, local, module
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.live.load import load_into

RUNS = [
    (("tp", "pp"), (2, 2), Topology(tp=2, pp=2)),
    (("pp", "dp"), (2, 2), Topology(dp=2, pp=2)),
    (("ep", "tp"), (2, 2), Topology(dp=2, tp=2, ep=2)),
    (("fsdp", "tp"), (2, 2), Topology(dp=2, tp=2)),
]


def main() -> None:
    """Load on every mesh; a rank that holds anything else ends with an error."""
    distributed.init_process_group("gloo")
    saved = Saved(Path(sys.argv[1]) / str(distributed.get_rank()))
    distributed.barrier()
    for names, shape, topology in RUNS:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        at = dict(zip(names, mesh.get_coordinate() or (), strict=True))
        dp = at.get("dp", at.get("fsdp", at.get("ep", 0)))
        rank = (at.get("pp", 0) * topology.dp + dp) * topology.tp + at.get("tp", 0)
        (wanted,) = local(saved, Place(topology, rank))
        own = module({name: states["weight"].shape for name, (_, states) in wanted.items()})
        optimizer = optim.AdamW(own.parameters())
        path = Path(sys.argv[1]) / "0"
        load_into(own, mesh, path, optimizer=optimizer)
        for name, (_, states) in wanted.items():
            param = own.get_parameter(name)
            held = {**optimizer.state[param], "weight": param.detach()}
            for state in STATES:
                assert torch.equal(held[state], torch.from_numpy(states[state].copy())), (names, name, state)
    sharded_stages(saved, Path(sys.argv[1]) / "0")
    refused(saved.path.parent)
    print(f"rank {distributed.get_rank()} of {distributed.get_world_size()} is right", flush=True)
    distributed.barrier()  # a rank that leaves early takes its connections with it
    os._exit(0)


def sharded_stages(saved: Saved, path: Path) -> None:
    """Two stages that number their layers from 0, each sharded by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, shard = mesh.get_coordinate() or ()
    (wanted,) = local(saved, Place(Topology(dp=2, pp=2), stage * 2 + shard))
    own = module({name: states["weight"].shape for name, (_, states) in wanted.items()})
    fully_shard(own, mesh=mesh["dp"])
    optimizer = optim.AdamW(own.parameters())
    load_into(own, mesh, path, optimizer=optimizer)
    for name, (_, states) in wanted.items():
        param = own.get_parameter(name)
        held = {**optimizer.state[param], "weight": param.detach()}
        for state in STATES:
            whole = held[state].full_tensor() if isinstance(held[state], DTensor) else held[state]
            assert torch.equal(whole, torch.from_numpy(states[state].copy())), (name, state)


def refused(path: Path) -> None:
    """A slice of a mesh, and a dim of another name, are refused on all ranks alike."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "model"))
    for own, said in ((mesh, "got dp, model"), (mesh["dp"], "DeviceMesh of all 4 ranks")):
        with pytest.raises(UsageError, match=said):
            load_into(module({"w": (1,)}), own, path)


if __name__ == "__main__":
    main()
