"""On a CUDA machine: how long training stands still for a save of a few GB, and whether what is saved is exact.

    python tests/bench/chains/save_cuda.py [--gigabytes 3] [--saves 4] [--device cuda]

Every way saves several times while the model trains on. `ucp.save` is checked: every state in its last store must have
the bits that it had at the call. Exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import ucp
from ucp.saving.job import SaveJob

WIDTH, STEPS = 2048, 10
Wait = Callable[[], object]
States = dict[tuple[str, str], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="of weights and moments")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    torch.manual_seed(0)
    layers = max(1, round(asked.gigabytes * 1e9 / (12 * 12 * WIDTH**2)))
    blocks = [nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(4, 256, WIDTH, device=asked.device)
    folder = Path(tempfile.mkdtemp())
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    has_trained, write = threading.Event(), SaveJob.write

    def hold_write(job: SaveJob) -> None:
        """Write after the model has changed."""
        has_trained.wait()
        write(job)

    def by_torch(path: Path) -> Wait:
        with path.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            os.fsync(file.fileno())
        return lambda: None

    def by_dcp(path: Path) -> Wait:
        weights, states = get_state_dict(model, optimizer)
        return dcp.async_save({"model": weights, "optimizer": states}, checkpoint_id=path).result

    def by_ucp(path: Path) -> Wait:
        return ucp.save(model, optimizer, None, path, asynchronous=True).wait

    step()
    plain = _time(step, asked.device)
    states = copy_states(model, optimizer)
    nbytes = sum(state.nbytes for state in states.values())
    del states
    name = torch.cuda.get_device_name() if asked.device == "cuda" else asked.device
    print(f"{name}, torch {torch.__version__}, {nbytes / 1e9:.2f} GB in {layers} layers, a step takes {plain:.4f} s")
    ok = True
    for title, save in (("torch.save", by_torch), ("dcp.async_save", by_dcp), ("ucp.save", by_ucp)):
        stalls, slower, written = [], [], []
        for number in range(asked.saves):
            path = folder / f"{title}-{number}"
            is_checked = save is by_ucp and number == asked.saves - 1
            states = copy_states(model, optimizer) if is_checked else {}
            if is_checked:
                SaveJob.write = hold_write  # type: ignore[method-assign]
            _wait_for(asked.device)
            has_trained.clear()
            began = time.perf_counter()
            wait = save(path)
            stalls.append(time.perf_counter() - began)
            slower.append(STEPS * (_time(step, asked.device) - plain))
            has_trained.set()
            wait()
            written.append(time.perf_counter() - began)
            if is_checked:
                ok = check(path, states)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        print(
            f"{title:<15} stall {median(stalls[1:]):7.4f} s (first {stalls[0]:.4f})  next {STEPS} steps "
            f"{median(slower[1:]):+8.4f} s  written after {median(written[1:]):6.2f} s",
            flush=True,
        )
    distributed.destroy_process_group()
    shutil.rmtree(folder)
    sys.exit(not ok)


def copy_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    """All weights, buffers and moments, on their device."""
    params = dict(model.named_parameters())
    copied = {(name, "weight"): value.detach().clone() for name, value in model.state_dict().items()}
    for name, param in params.items():
        values: dict[str, Any] = optimizer.state[param]
        copied |= {(name, key): value.clone() for key, value in values.items() if value.shape == param.shape}
    return copied


def check(path: Path, states: States) -> bool:
    """Whether a store has these bits, and no other tensors."""
    checkpoint = ucp.open(path)
    atoms = checkpoint.index.atoms
    held = {(name, state) for name, atom in atoms.items() for state in atom.states if state != "step"}
    wrong = [f"{name}/{state}" for name, state in held ^ states.keys()]
    for (name, state), expected in states.items():
        if (name, state) in held:
            found = checkpoint.read(name, state=state).to(expected.device)
            if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
                wrong.append(f"{name}/{state}")
    print(f"ucp.save: {len(states)} states compared with those at the call, {len(wrong)} differ {wrong[:4]}")
    return not wrong


def _time(step: Wait, device: str) -> float:
    """Seconds of a step, on average."""
    _wait_for(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    _wait_for(device)
    return (time.perf_counter() - began) / STEPS


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
