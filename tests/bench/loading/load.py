"""`ucp.load_into` of replicas (dp=4, gloo): bytes read, time and memory, by how the ranks exchange what they read.

    python -m tests.bench --case load

The checkpoint of a GiB lies in the page cache; a second time the ranks read it at 400 MB/s together, as from a file
server. Each way is run several times, in turn; medians are shown.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from ucp.live.exchange.stages import Exchange
from ucp.testing.handmade import Shards, make_index, write_checkpoint

RANKS = 4
LAYERS, SHAPE = 16, (2048, 2048)
RATE = 400e6
"""Bytes per second of the store that is held up."""


def main(repeats: int) -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "checkpoint")
        nbytes = _write(checkpoint)
        print(f"{nbytes / 2**30:.2f} GiB, {RANKS} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        for rate in (0.0, RATE):
            found: dict[Exchange, list[list[dict[str, float]]]] = {own: [] for own in Exchange}
            for _ in range(repeats):
                for exchange in Exchange:
                    found[exchange].append(_run(checkpoint, exchange, rate, Path(folder)))
            for exchange, runs in found.items():
                seconds = median(max(own["seconds"] for own in run) for run in runs)
                busy = median(sum(own["busy"] for own in run) for run in runs)
                grown = max(own["grown"] for run in runs for own in run)
                read = median(run[0]["total"] for run in runs) / nbytes
                where = f"{rate / 1e6:.0f} MB/s" if rate else "page cache"
                cost = f"{seconds:6.2f} s  {busy:6.2f} CPU s  +{grown / 2**20:.0f} MiB"
                print(f"{where:>10}  {exchange.value:<6}  read {read:.2f}x  {cost}")


def _write(folder: Path) -> int:
    shards = Shards(folder)
    random = np.random.default_rng(0)
    states, shapes = {}, {}
    for layer in range(LAYERS):
        for kind in ("q", "o", "up", "down"):
            name = f"layers.{layer}.{kind}"
            array = random.normal(size=SHAPE).astype(np.float32)
            states[name, "weight"] = shards.whole(array, file=f"{layer}.bin")
            shapes[name] = SHAPE
    write_checkpoint(make_index(folder, states))
    (folder / "shapes.json").write_text(json.dumps(shapes))
    return sum(state.nbytes for state in states.values())


def _run(checkpoint: Path, exchange: Exchange, rate: float, out: Path) -> list[dict[str, float]]:
    """What each rank says."""
    (out / "clock").write_bytes(struct.pack("d", 0.0))
    worker = str(Path(__file__).with_name("load_worker.py"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launcher, worker, str(checkpoint), exchange.value, str(rate), str(out)]
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]
