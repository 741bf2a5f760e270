"""Sparse windows of a run over processes: killed, replayed in new ones, the state is that of the run bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ucp

HERE = Path(__file__).parent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]


def run_ranks(mode: str, pp: int, out: Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(2 * pp)]
    command = [*launcher, str(HERE / "replay_worker.py"), mode, str(pp), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environment)


@pytest.mark.parametrize("pp", [2])
def test_a_killed_run_is_replayed_bit_for_bit(tmp_path: Path, pp: int) -> None:
    killed = run_ranks("train", pp, tmp_path)
    assert "SIGKILL" in killed.stderr, killed.stderr[-4000:]
    assert len(list(tmp_path.glob("truth-*.pt"))) == 2 * 2 * pp, killed.stderr[-4000:]
    recovered = run_ranks("recover", pp, tmp_path)
    assert recovered.returncode == 0, recovered.stderr[-4000:]
    for rank in range(2 * pp):
        for result in json.loads((tmp_path / f"recover-{rank}.json").read_text()):
            assert result["differing"] == []
            assert result["at the end"] == []
            assert result["with wrong norm"] > 5
            assert result["iteration"] > 3
            assert result["trained"] == sorted(result["trained"])
            assert "clip_norm" in result["refused"]
    for dtype in ("float32", "bfloat16"):
        assert ucp.verify(tmp_path / f"chain-{dtype}").ok


def test_one_stage_is_replayed_from_what_the_other_sent(tmp_path: Path) -> None:
    replayed = run_ranks("stages", 2, tmp_path)
    assert replayed.returncode == 0, replayed.stderr[-4000:]
    for rank in range(4):
        for result in json.loads((tmp_path / f"stages-{rank}.json").read_text()):
            assert result["differing"] == []
            assert result["at the end"] == []
            assert result["logged"] > result["logged at last"] > 0


def test_shards_of_a_model_are_replayed(tmp_path: Path) -> None:
    replayed = run_ranks("shards", 1, tmp_path)
    assert replayed.returncode == 0, replayed.stderr[-4000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"shards-{rank}.json").read_text()) == [{"trained": [4, 8], "differing": 0}]
