"""One rank of `test_save.py`: background saves of some experts with snapshots; then rank 1 loses its memory.

torchrun --nproc-per-node 2 snapshot_worker.py CHAIN
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[4]))

import ucp
from tests.unit.live.saving.test_snapshots import TOPOLOGY, make_part

STEPS = 5


def main() -> None:
    """Save, lose, load; a rank that holds anything else ends with an error."""
    dist.init_process_group("gloo")
    chain, rank, snapshots = Path(sys.argv[1]), dist.get_rank(), ucp.Snapshots()
    for step in range(STEPS):
        model, optimizer = make_part(rank, step)
        plan = ucp.PartialExperts(2, written=1) if step else ucp.Full()
        options = {"step": step, "plan": plan, "chain": True, "snapshots": snapshots, "asynchronous": True}
        handle = ucp.save(model, optimizer, TOPOLOGY, chain / f"step{step}", **options)
    handle.wait()
    kept = {item.param for item in snapshots._snapshots[-1].tensors}
    snapshots = ucp.Snapshots() if rank else snapshots
    model, optimizer = make_part(rank, 99)
    ucp.load_into(model, TOPOLOGY, chain, optimizer=optimizer, snapshots=snapshots, verify=True)
    newest = ucp.open(chain)
    for number, expert in enumerate(model["moe"]["experts"]):
        name = f"moe.experts.{2 * rank + number}.weight"
        iteration = newest[name].index.iteration
        known = newest.step if iteration is None else iteration
        wanted = 100 * (2 * rank + number) + (STEPS - 1 if rank == 0 and name in kept else known)
        assert expert.weight[0, 0].item() == wanted, (name, expert.weight[0, 0].item(), wanted)
    assert model["moe"]["router"].weight[0, 0].item() == newest.step
    print(f"rank {rank} is right", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
