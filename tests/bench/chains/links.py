"""Indexing a chain of 200 links: `ucp.inspect` of 10,000 parameters with three states, of which a link holds 600.

python -m tests.bench --case chain
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

import ucp
from ucp.core.index import StateIndex
from ucp.testing.handmade import Shards, make_index, write_checkpoint

LINKS, LAYERS, EXPERTS, SAVED = 200, 100, 100, 6
_LOOK = """
import sys, time, ucp
began = time.perf_counter(), time.process_time()
index = ucp.inspect(sys.argv[1])
print(len(index.atoms), time.perf_counter() - began[0], time.process_time() - began[1])
"""


def main(repeats: int) -> None:
    """Print a line."""
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder))
        command = [sys.executable, "-c", _LOOK, folder]
        runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(repeats)]
        params, seconds, cpu = zip(*(map(float, text.split()) for text in runs), strict=True)
        print(
            f"{LINKS} links, {params[0]:,.0f} parameters, load {os.getloadavg()[0]:.1f}: "
            f"{median(seconds):.2f} s, {median(cpu):.2f} CPU s"
        )


def _write(root: Path) -> None:
    """A full link, then links with six experts of every layer, by turns."""
    for link in range(LINKS):
        experts = [(link * SAVED + number) % EXPERTS for number in range(SAVED)] if link else range(EXPERTS)
        names = [f"layers.{layer}.moe.experts.{expert}.w" for layer in range(LAYERS) for expert in experts]
        folder = root / str(link)
        state = StateIndex.from_tensor(Shards(folder).put(np.zeros(4, "f4")))
        states = {(name, key): state for name in names for key in ("weight", "exp_avg", "exp_avg_sq")}
        write_checkpoint(replace(make_index(folder, states), step=link))
    ucp.add_to_chain(root, [root / str(link) for link in range(LINKS)])
