"""The big real checkpoints that are converted: about 210M parameters, made once with real DeepSpeed on 4 ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["big_checkpoints"]

CASES = {"z3": "z3-dp4-fp32", "z1": "z1-dp4-bf16"}
"""Label to the row of fixtures/deepspeed_cases.py it is a large version of."""

RANKS = 4


def big_checkpoints(cache: Path) -> dict[str, Path]:
    """Folders that `engine.save_checkpoint` wrote, by label; made if they are not in `cache` yet."""
    found = {}
    for label, case in CASES.items():
        folder = cache / case
        if not (folder / "done").exists():
            _make(case, folder)
            (folder / "done").touch()
        found[label] = folder / "checkpoint"
    return found


def _make(case: str, folder: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "fixtures" / "deepspeed_train.py"
    folder.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    options = ["--case", case, "--model-scale", "big", "--no-truth", "--steps-after", "0", "--out", str(folder)]
    print(f"making the big {case} checkpoint with real DeepSpeed (minutes)", file=sys.stderr, flush=True)
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(script), *options], env=env, check=True, stdout=subprocess.DEVNULL)
    for script_copy in (folder / "checkpoint").glob("*.py"):
        script_copy.unlink()
