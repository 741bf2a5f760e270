"""Workers of Ray Train go on after a failure, and as another number of workers, by `ucp.integrations.ray_train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1600)]

WORKER = Path(__file__).with_name("ray_train_worker.py")


def test_workers_go_on(tmp_path: Path) -> None:
    python = os.environ.get("UCP_RAY_TRAIN", sys.executable)
    if subprocess.run([python, "-c", "import ray.train.torch"], capture_output=True, check=False).returncode:
        pytest.skip("needs ray[train], here or in the Python that UCP_RAY_TRAIN names")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_TRAIN_V2_ENABLED": "1"}
    command = [python, str(WORKER), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    runs = json.loads((tmp_path / "losses.json").read_text())
    for name in ("restarted", "others"):
        assert runs[name]["start"] == runs["plain"]["start"], name
        assert runs[name]["losses"] == pytest.approx(runs["plain"]["losses"], rel=1e-5), name
