"""`ucp.stream` of models of transformers, beside the formula of the ring and accelerate's `disk_offload`.

    python -m tests.bench --case stream

Every way is a process of its own, in turn; the table has medians of passes. "disk": the files are dropped from the page
cache before each pass, as those of a model larger than memory would be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import TypeAlias

WORKER = Path(__file__).with_name("worker.py")
WAYS = ("ucp", "disk_offload")
TOKENS = (1, 256)
_Figures: TypeAlias = dict[str, float]


def main(repeats: int) -> None:
    """Print a table."""
    for model in os.environ.get("UCP_BENCH_MODEL", "dense,mixture").split(","):
        root = Path(".bench", f"stream-{model}").absolute()
        if not (root / "done").exists():
            _run("make", model, root)
            (root / "done").touch()
        for medium in ("cache", "disk"):
            for tokens in TOKENS:
                _contest(model, root, medium, tokens, repeats)


def _contest(model: str, root: Path, medium: str, tokens: int, repeats: int) -> None:
    runs: dict[str, list[_Figures]] = {way: [] for way in ("whole", "reading", *WAYS)}
    for _ in range(repeats):
        for way, of_way in runs.items():
            of_way.append(_run(way, root, medium, tokens))
    seconds = {way: median(run["seconds"] for run in of_way) for way, of_way in runs.items()}
    peak = {way: max(run["peak"] for run in of_way) / 1e6 for way, of_way in runs.items()}
    bound = max(seconds["whole"], seconds["reading"])
    print(
        f"{model:<8} {medium:<6} {tokens:4} tokens, load {os.getloadavg()[0]:4.1f}:  whole {seconds['whole']:.3f} s "
        f"{peak['whole']:5.0f} MB  reading {seconds['reading']:.3f} s  "
        f"ucp {seconds['ucp']:.3f} s {peak['ucp']:4.0f} MB, {seconds['ucp'] / bound:.2f} of the formula  "
        f"disk_offload {seconds['disk_offload']:.3f} s {peak['disk_offload']:4.0f} MB, "
        f"{seconds['disk_offload'] / seconds['ucp']:.2f}x",
        flush=True,
    )


def _run(*arguments: object) -> _Figures:
    python = os.environ.get("UCP_TRANSFORMERS", sys.executable)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [python, str(WORKER), *map(str, arguments)], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-3000:]}")
    figures: _Figures = json.loads(done.stdout.splitlines()[-1])
    return figures
