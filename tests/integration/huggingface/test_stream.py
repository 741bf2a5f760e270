"""`ucp.stream` runs models of transformers with a third of their size as memory, with the logits of the whole model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

WORKER = Path(__file__).with_name("stream_worker.py")


@pytest.fixture(scope="module")
def python() -> str:
    """Python with transformers; `make integration` makes one."""
    python = os.environ.get("UCP_TRANSFORMERS", sys.executable)
    if subprocess.run([python, "-c", "import transformers"], check=False, capture_output=True).returncode:
        pytest.skip("needs transformers, here or where UCP_TRANSFORMERS says")
    return python


def run(*command: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MALLOC_ARENA_MAX": "2"}
    return subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, check=False, timeout=500)


@pytest.mark.parametrize("model", ["mixtral", "qwen2", "qwen3"])
def test_a_third_of_the_memory_is_enough(model: str, python: str, tmp_path: Path) -> None:
    assert run(python, WORKER, "make", model, tmp_path).returncode == 0
    whole = run(python, WORKER, "load", tmp_path)
    assert "loaded" not in whole.stdout, "the limit does not limit anything"
    streamed = run(python, WORKER, "ucp", tmp_path)
    assert streamed.returncode == 0, streamed.stderr[-3000:]
    told = json.loads(streamed.stdout.splitlines()[-1])
    assert told["resident"] < told["size"] / 3
    assert told["hits"] > 0


@pytest.mark.parametrize(("model", "count"), [("llama", 2), ("llama", 4), ("qwen3", 2)])
def test_ranks_read_a_part_each(model: str, count: int, python: str, tmp_path: Path) -> None:
    assert run(python, WORKER, "make", model, tmp_path).returncode == 0
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count)
    result = run(python, *launcher, WORKER, "ranks", tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    read = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    if model == "llama":  # 2 layers ahead, and 12 in each pass: 3 of logits, and one for each token that is generated
        total = read["layers"] * (2 + (3 + 20) * 12) / 12
        assert [rank["never"] for rank in read["ranks"]] == [total] * count
        assert all(abs(rank["always"] - total / count) < total / 1000 for rank in read["ranks"])
    else:
        assert all(rank["always"] < rank["never"] for rank in read["ranks"])
