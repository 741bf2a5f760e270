"""Runs of the Hugging Face Trainer and of accelerate (`client_worker.py`), as tests start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("client_worker.py")
CHECKPOINT = {"trainer": "checkpoint-3", "accelerate": ""}
"""Script to the folder of its checkpoint below the one it saves to."""
LATER = ("4", "5", "6")
"""Steps after the checkpoint."""
TOLERANCE = 1e-6
"""Largest relative difference of a loss in fp32, whose sums over ranks go in another order."""


def python_with(needed: Sequence[str]) -> str:
    """Python that has these packages; `make integration` makes one. Skips the test where there is none."""
    found = os.environ.get("UCP_TRANSFORMERS", sys.executable)
    missing = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, {tuple(needed)})))"
    if subprocess.run([found, "-c", missing], check=False).returncode:
        pytest.skip(f"needs {', '.join(needed)}, here or where UCP_TRANSFORMERS says; `make integration` installs them")
    return found


def run(python: str, out: Path, script: str, *asked: object, ranks: int) -> dict[str, Any]:
    """What the worker told."""
    # torch builds operators by name: one folder for all releases of DeepSpeed would mix them.
    builds = Path.home() / ".cache" / "torch_extensions" / "trainer"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(builds))
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, WORKER]
    command = [str(word) for word in (*launch, script, out, *asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())
