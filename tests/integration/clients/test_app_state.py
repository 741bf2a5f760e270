"""A checkpoint of torch's DCP tutorial, `{"app": {...}}`, goes on in DeepSpeed at its step, rate and losses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def test_deepspeed_goes_on_at_the_step_and_the_rate(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "MASTER_PORT": str(port)}
    worker = Path(__file__).with_name("app_state_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(tmp_path)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    for how in ("converted", "loaded"):
        assert report[how] == {"step": 3, "losses": report["losses"]}, how
