"""How long a run of two ranks stands still for a save: `ucp.save` in the background beside the saves of others.

python -m tests.bench --case save
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

RANKS = 2
WAYS = {
    "torch": "torch.save",
    "dcp": "torch.distributed.checkpoint.async_save",
    "deepspeed": "DeepSpeed's save_checkpoint",
    "ucp": "ucp.save(asynchronous=True)",
}


def main(repeats: int) -> None:
    """Print a table. `repeats`: saves in each way, after one that is not counted."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        print(f"{RANKS} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        for way, title in WAYS.items():
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            worker = str(Path(__file__).with_name("save_worker.py"))
            env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            subprocess.run([*launcher, worker, way, str(repeats + 1), folder], check=True, timeout=600, env=env)
            found = json.loads(Path(folder, f"{way}.json").read_text())
            stall, slower = median(found["stalls"][1:]), median(found["slower"][1:])
            print(
                f"{title:<40} {found['nbytes'] / 1e6:6.0f} MB  stall {stall:6.3f} s (first {found['stalls'][0]:.3f})  "
                f"steps after it {slower:+6.2f} s  written after {median(found['written'][1:]):6.2f} s  "
                f"(a step: {found['step']:.2f} s)"
            )
