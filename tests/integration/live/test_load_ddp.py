"""`load_into` in real processes over gloo: every rank reads its share, holds everything, and fails with the others."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ucp.testing.handmade import Shards, make_index, write_checkpoint

HERE = Path(__file__).parent
FIXTURE = HERE.parents[2] / "fixtures" / "deepspeed" / "z1-dp4-fp32"

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TOLERANCE = 1e-5
"""Largest relative difference of a loss: gradients are summed over ranks in another order."""


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A checkpoint of 40 MB in one tensor and little besides; its folder, and the digest of the model."""
    random = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("large")
    shards = Shards(folder)
    arrays = {
        "emb": random.normal(size=(10_000, 1_000)).astype(np.float32),
        "bias": random.normal(size=301).astype(np.float32),
        "coarse": random.integers(0, 1 << 7, size=(257, 3)).astype(np.float32),
    }
    write_checkpoint(make_index(folder, {(name, "weight"): shards.whole(own) for name, own in arrays.items()}))
    halves = (arrays.pop("coarse").view(np.uint32) >> 16).astype(np.uint16)  # small whole numbers are exact in bfloat16
    return folder, hashlib.sha256(b"".join(own.tobytes() for own in [*arrays.values(), halves])).hexdigest()


@pytest.fixture(scope="session", params=[2, 3])
def results(request, large, tmp_path_factory):
    """What every rank wrote down."""
    out = tmp_path_factory.mktemp(f"ranks{request.param}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    command = [*launcher, str(HERE / "load_worker.py"), str(FIXTURE), str(large[0]), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(request.param)]


def test_every_rank_holds_the_truth_and_trains_on(results):
    facts = json.loads((FIXTURE / "truth.json").read_text())
    for own in results:
        assert own["resumed"]["different"] == []
        assert own["resumed"]["compared"] > 40
        assert own["resumed"]["ranks"] == len(results)
        assert own["resumed"]["losses"] == results[0]["resumed"]["losses"]
        assert own["resumed"]["losses"] == pytest.approx(facts["losses_after"], rel=TOLERANCE)


def test_every_rank_reads_its_share_of_the_bytes(results, large):
    total = results[0]["shared"]["total"]
    assert total == 4 * (10_000 * 1_000 + 301 + 257 * 3)
    assert sum(own["shared"]["read"] for own in results) == total
    for own in results:
        # a part may be short of its fellows by some alignment, in each of the 40 buckets
        assert abs(own["shared"]["read"] - total / len(results)) <= 40 * 64
        assert own["shared"]["digest"] == large[1]


def test_memory_is_that_of_a_bucket_not_of_the_tensor(results):
    for own in results:
        assert own["shared"]["grown"] < 16 << 20  # a bucket of 1 MB, threads and their stacks; the tensor has 40 MB


def test_all_ranks_fail_as_the_one_that_fails(results):
    count = len(results)
    for own in results:
        assert own["failed"]["kind"] == "UnknownFormatError"
        assert own["failed"]["text"].startswith(f"rank 1 of {count}: expected a checkpoint at")
        assert own["failed"]["kept"]


def test_a_group_of_some_ranks_loads_alone(results, large):
    for own in results[:2]:
        assert own["subgroup"] == {"ranks": 2, "digest": large[1]}
