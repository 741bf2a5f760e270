"""`ucp inspect --experts` of a checkpoint of 2.6 GB over reading its files once, from the page cache.

    python -m tests.bench --case experts

One checkpoint has weights and moments in float32 (an atom store), another weights in bfloat16 (a Hugging Face folder).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import save_file

from tests.bench.measure import run
from ucp.testing.handmade import Shards, make_index, write_checkpoint

SHAPE = (1024, 4096)
GIGABYTES = float(os.environ.get("UCP_BENCH_GB", "2.6"))
EXPERTS = 8
_BLOCK = 1 << 20


def main(repeats: int) -> None:
    """Print a table."""
    ucp = str(Path(sys.executable).parent / "ucp")
    for name, write in (("float32, 3 states", _write_states), ("bfloat16 weights", _write_weights)):
        root = Path(".bench", f"experts-{write.__name__[7:]}").absolute()
        if not (root / "done").exists():
            root.mkdir(parents=True, exist_ok=True)
            write(root)
            (root / "done").touch()
        reads, samples = [], []
        for _ in range(repeats):
            began = time.perf_counter(), time.process_time()
            nbytes = _read(root)
            reads.append((time.perf_counter() - began[0], time.process_time() - began[1]))
            samples.append(run([ucp, "inspect", str(root), "--experts"], env={"OMP_NUM_THREADS": "1"}))
        seconds, cpu = (median(of_run) for of_run in zip(*reads, strict=True))
        looked, busy = median(sample.seconds for sample in samples), median(sample.cpu_seconds for sample in samples)
        peak = max(sample.peak_bytes for sample in samples)
        print(f"{name}, {nbytes / 1e9:.2f} GB, load {os.getloadavg()[0]:.1f}")
        print(f"  reading    {seconds:6.2f} s, {cpu:6.2f} CPU s")
        print(f"  --experts  {looked:6.2f} s, {busy:6.2f} CPU s, {peak / 1e6:.0f} MB: {looked / seconds:.2f}x")


def _names(itemsize: int) -> Iterator[str]:
    layers = round(GIGABYTES * 1e9 / (3 * EXPERTS * SHAPE[0] * SHAPE[1] * itemsize))
    for layer in range(max(layers, 1)):
        for expert in range(EXPERTS):
            yield from (f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w{n}.weight" for n in (1, 2, 3))


def _write_states(root: Path) -> None:
    random, shards = np.random.default_rng(0), Shards(root)
    states = {
        (name, state): shards.whole(random.random(SHAPE, dtype=np.float32), file=f"{number // 64}.bin")
        for number, name in enumerate(_names(12))
        for state in ("weight", "exp_avg", "exp_avg_sq")
    }
    write_checkpoint(make_index(root, states))


def _write_weights(root: Path) -> None:
    names = list(_names(2))
    for number in range(0, len(names), 64):
        tensors = {name: torch.randn(SHAPE).to(torch.bfloat16) for name in names[number : number + 64]}
        save_file(tensors, root / f"model-{number // 64 + 1:05d}-of-{-(-len(names) // 64):05d}.safetensors")


def _read(root: Path) -> int:
    total, block = 0, bytearray(_BLOCK)
    for path in (*root.glob("*.bin"), *root.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                total += count
    return total
