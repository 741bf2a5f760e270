"""`load_into` models that torch shards: FSDP2, tensor parallelism, HSDP; from checkpoints of torch and of DeepSpeed.

Every rank then holds, bit for bit, what the run that saved held, and goes on as that did.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FOUR = [
    {"source": "torch/hsdp-dp2x2", "case": "fsdp2-dp4"},
    {"source": "torch/fsdp2-dp4", "case": "hsdp-dp2x2", "stepped": True, "topology": "dp_replicate=2,dp_shard=2"},
    {"source": "torch/fsdp2-pp2-dp2", "case": "fsdp2-dp2-tp2", "topology": "dp=2,tp=2"},
    {"source": "torch/fsdp1-local-dp4", "case": "fsdp2-dp2-tp2", "stepped": True},
    {"source": "torch/ddp-dp2", "case": "fsdp2-dp4", "forms": ["foreach"]},
    {"source": "deepspeed/z1-dp4-fp32", "case": "fsdp2-dp4", "topology": "dp=4", "forms": ["fused"]},
    {"source": "deepspeed/z3-dp4-fp32", "case": "hsdp-dp2x2", "stepped": True},
    {"source": "torch/ddp-dp2", "case": "fsdp2-dp4", "meta": True},
    {"source": "torch/fsdp2-pp2-dp2", "case": "fsdp2-dp2-tp2", "meta": True},
]
TWO = [
    {"source": "torch/fsdp2-dp4", "fields": {"shard": 2}},
    {"source": "torch/verl-fsdp2-dp4", "fields": {"shard": 2}},
    {"source": "torch/fsdp2-dp2-tp2", "fields": {"tp": 2, "model": "parallel"}},
    {"source": "deepspeed/z3-dp4-fp32", "fields": {"shard": 2}},
    {"source": "torch/ddp-dp2", "fields": {"shard": 2}, "wrapped": True},
]
FSDP1 = [
    {
        "source": source,
        "fields": {"wrap": "fsdp1", "shard": 4, **({"saved": "local"} if source.endswith("raw") else {})},
        "fsdp1": {"strategy": strategy, "use_orig_params": not source.endswith("raw"), "nested": nested},
        **others,
    }
    for source, strategy, nested, others in (
        ("torch/fsdp2-dp4", "FULL_SHARD", True, {"stepped": True}),
        ("torch/ddp-dp2", "HYBRID_SHARD", True, {"stepped": True}),
        ("torch/ddp-dp2", "NO_SHARD", False, {}),
        ("torch/hsdp-dp2x2", "SHARD_GRAD_OP", True, {"stepped": True}),
        ("torch/fsdp2-dp2-raw", "SHARD_GRAD_OP", True, {}),
        ("torch/fsdp2-dp2-raw", "FULL_SHARD", False, {"stepped": True}),
    )
]
ZERO = [
    {"source": "torch/fsdp2-dp4", "fields": {"wrap": "ddp", "dp": 4}, "zero": {}},
    {"source": "torch/hsdp-dp2x2", "fields": {"wrap": "ddp", "dp": 4}, "zero": {}, "stepped": True},
    {"source": "torch/ddp-dp2", "fields": {"wrap": "ddp", "dp": 4}, "zero": {"parameters_as_bucket_view": True}},
]


def told(jobs, ranks, out):
    """What every rank wrote down, for each job."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(HERE / "sharded_worker.py"), json.dumps(jobs), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return list(zip(*(json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)), strict=True))


def check(job, ranks):
    for own in ranks:
        assert own["wrong"] == [], job
        assert own["compared"] > (14 if "zero" in job else 40)
        assert own["states"] == 3
        assert own["reused"] in (None, True), job
        assert own["losses"] == pytest.approx(own["wanted"], rel=1e-5), job


def test_four_ranks_hold_the_truth_and_go_on(tmp_path):
    for job, ranks in zip(FOUR, told(FOUR, 4, tmp_path), strict=True):
        check(job, ranks)


def test_flat_parameters_hold_the_truth_and_go_on(tmp_path):
    for job, ranks in zip(FSDP1, told(FSDP1, 4, tmp_path), strict=True):
        check(job, ranks)


def test_ranks_that_step_parameters_for_others_have_the_states_of_these(tmp_path):
    for job, ranks in zip(ZERO, told(ZERO, 4, tmp_path), strict=True):
        check(job, ranks)
        assert sum(own["stepped"] for own in ranks) == 12


def test_masters_of_sharded_weights_hold_the_truth(tmp_path):
    job = {"source": "torch/fsdp2-dp4", "fields": {"shard": 2, "dtype": "bfloat16"}, "masters": True}
    (ranks,) = told([job], 2, tmp_path)
    for own in ranks:
        assert own["wrong"] == []
        assert own["compared"] == 4 * 12
        assert "12 weights are cast from masters that the optimizer steps" in own["notes"]


def test_two_ranks_hold_the_truth_and_go_on(tmp_path):
    for job, ranks in zip(TWO, told(TWO, 2, tmp_path), strict=True):
        check(job, ranks)
