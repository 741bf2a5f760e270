"""One rank of `tests.bench.chains.save`: trains, saves every few steps in one WAY, and says how long it stood still.

torchrun --nproc-per-node 2 tests/bench/chains/save_worker.py WAY SAVES OUT

"Stall": seconds from the call until the program can go on, of the slowest rank. "Slower": seconds that the steps
between two saves took longer than without saves, because writing takes processor time from training.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ucp

WIDTH, LAYERS, STEPS = 512, 11, 4
Wait = Callable[[], object]


def main() -> None:
    way, saves, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    blocks = [nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)]
    model = nn.Sequential(*blocks)
    data = torch.randn(1, 64, WIDTH)
    step, save = (_deepspeed if way == "deepspeed" else _fsdp)(model, data, way)
    step()
    plain = [_time(step) for _ in range(3 * STEPS)]
    stalls, slower, written = [], [], []
    wait: Wait | None = None
    for number in range(saves):
        folder = out / f"{way}-{number}"
        distributed.barrier()
        began = time.perf_counter()
        wait = save(folder)
        stalls.append(_slowest(time.perf_counter() - began))
        steps = [_time(step) for _ in range(STEPS)]
        slower.append(sum(steps) - STEPS * median(plain))
        if wait is not None:
            wait()
        distributed.barrier()
        written.append(time.perf_counter() - began)
        if rank == 0:
            nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
    if rank == 0:
        result = {"stalls": stalls, "slower": slower, "written": written, "step": median(plain), "nbytes": nbytes}
        (out / f"{way}.json").write_text(json.dumps(result))
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def _fsdp(model: nn.Module, data: torch.Tensor, way: str) -> tuple[Wait, Callable[[Path], Wait | None]]:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def by_torch(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with (folder / f"{distributed.get_rank()}.pt").open("wb") as file:
            torch.save(states, file)
            os.fsync(file.fileno())

    group = distributed.new_group(backend="gloo")  # that of training may not be used beside it

    def by_dcp(folder: Path) -> Wait:
        weights, states = get_state_dict(model, optimizer)
        saved = dcp.async_save({"model": weights, "optimizer": states}, checkpoint_id=folder, process_group=group)
        return saved.result

    def by_ucp(folder: Path) -> Wait:
        return ucp.save(model, optimizer, None, folder, asynchronous=True).wait

    return step, {"torch": by_torch, "dcp": by_dcp, "ucp": by_ucp}[way]


def _deepspeed(model: nn.Module, data: torch.Tensor, way: str) -> tuple[Wait, Callable[[Path], Wait | None]]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": len(data),
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config)

    def step() -> None:
        engine.backward(engine(data).square().mean())
        engine.step()

    def save(folder: Path) -> None:
        engine.save_checkpoint(str(folder))

    return step, save


def _time(work: Wait) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    distributed.all_reduce(value, distributed.ReduceOp.MAX)
    return float(value)


if __name__ == "__main__":
    main()
