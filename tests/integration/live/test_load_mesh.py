"""`load_into` on real DeviceMeshes over gloo, in orders that are not Megatron's: every rank gets its own slices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_the_mesh_says_where_ranks_are(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, str(Path(__file__).with_name("mesh_worker.py")), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    right = re.findall(r"rank (\d) of 4 is right", done.stdout)  # lines of ranks may run into one another
    assert sorted(right) == ["0", "1", "2", "3"]
