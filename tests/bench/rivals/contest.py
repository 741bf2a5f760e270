"""`ucp.load_into` beside what a project loads with itself: the same state, in fresh processes, each way in turn.

    python -m tests.bench --case load-dcp          FSDP2 on 4 ranks: `torch.distributed.checkpoint` and `state_dict`
    python -m tests.bench --case load-deepspeed    ZeRO 1, 2 and 3, saved on 4 ranks, loaded on 2

DeepSpeed loads what its own `ds_to_universal` has made, whose time is told apart; ours is the checkpoint as it was
saved. Files are read from the page cache. UCP_BENCH_LAYERS is the size: 8 layers are over a GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.measure import run

LAYERS = os.environ.get("UCP_BENCH_LAYERS", "8")
SAVED_ON = 4
WAYS = ("theirs", "ours")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": ""}
"""Python may keep what it compiles: else every process compiles what is imported under way again."""


def beside_dcp(repeats: int) -> None:
    """Print a table."""
    _contest("fsdp2", repeats, ranks=4)


def beside_deepspeed(repeats: int) -> None:
    """Print a table."""
    for stage in (1, 2, 3):
        _contest(f"zero{stage}", repeats, ranks=2)


def _contest(engine: str, repeats: int, *, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "checkpoint")
        _launch(SAVED_ON, engine, "save", folder, place)
        nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if engine != "fsdp2":
            (tag,) = (path for path in folder.iterdir() if path.is_dir())
            command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
            folders = ["--input_folder", str(tag), "--output_folder", f"{tag}_universal"]
            cost = run([*command, *folders], env=_ENVIRONMENT)
            print(f"{engine}: ds_to_universal {cost.seconds:.2f} s, {cost.cpu_seconds:.2f} CPU s, not counted below")
        found: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
        for number in range(repeats):
            for way in WAYS if number % 2 else reversed(WAYS):
                _launch(ranks, engine, way, folder, place)
                found[way].append([json.loads(Path(place, f"{rank}.json").read_text()) for rank in range(ranks)])
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{engine}: {nbytes / 1e9:.2f} GB saved on {SAVED_ON} ranks, loaded on {ranks}; {machine}")
    for way, runs in found.items():
        print(f"{engine} {way:>6}: {_line(runs)}")
    same = len({tuple(own["digest"] for own in own_run) for runs in found.values() for own_run in runs}) == 1
    print(f"{engine}: masters and moments are {'the same' if same else 'NOT the same'} after both", flush=True)


def _line(runs: Sequence[Sequence[dict[str, Any]]]) -> str:
    seconds = median(max(own["seconds"] for own in told) for told in runs)
    busy = median(sum(own["busy"] for own in told) for told in runs)
    grown = max(own["grown"] for told in runs for own in told)
    asked = median(sum(own["asked"] for own in told) for told in runs)
    stages = " ".join(f"{stage} {spent:.2f}" for stage, spent in runs[-1][0]["stages"].items())
    return f"{seconds:6.2f} s {busy:6.2f} CPU s  +{grown / 2**20:.0f} MiB a rank  read {asked / 1e9:.2f} GB  {stages}"


def _launch(ranks: int, *words: object) -> None:
    engine, way, folder, out = words
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "tests.bench.rivals.worker", engine, way, folder, LAYERS, out]
    environment = {**os.environ, **_ENVIRONMENT}
    subprocess.run([str(word) for word in command], check=True, timeout=600, env=environment, stdout=subprocess.DEVNULL)
