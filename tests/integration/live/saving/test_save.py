"""`ucp.save` from runs that torch shards: in another layout the run holds the same bits and goes on in the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ucp

HERE = Path(__file__).parent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SAVED = [
    {"name": "fsdp2", "case": "fsdp2-dp4"},
    {"name": "hsdp", "case": "hsdp-dp2x2", "topology": "dp_replicate=2,dp_shard=2"},
    {"name": "tp", "case": "fsdp2-dp2-tp2", "topology": "dp=2,tp=2"},
    {"name": "ddp", "fields": {"wrap": "ddp", "dp": 4}, "topology": "dp=4", "asynchronous": True},
    {"name": "pp", "case": "fsdp2-pp2-dp2", "topology": "dp=2,pp=2"},
    {
        "name": "fsdp1",
        "fields": {"wrap": "fsdp1", "shard": 4},
        "fsdp1": {"strategy": "FULL_SHARD", "use_orig_params": True, "nested": True},
    },
]
LOADED = [
    {"source": "fsdp2", "case": "hsdp-dp2x2"},
    {"source": "hsdp", "case": "fsdp2-dp4"},
    {"source": "tp", "fields": {"shard": 4, "model": "parallel"}},
    {"source": "pp", "case": "fsdp2-dp2-tp2"},
    {"source": "fsdp1", "case": "fsdp2-dp4"},
    {"source": "ddp", "case": "fsdp2-dp4"},
]
LOADED_BY_TWO = [
    {"source": "fsdp2", "fields": {"wrap": "ddp", "dp": 2}},
    {"source": "hsdp", "fields": {"shard": 2}},
    {"source": "tp", "fields": {"tp": 2, "model": "parallel"}, "topology": "tp=2"},
    {"source": "ddp", "fields": {"shard": 2}},
]


def run_ranks(mode: str, jobs: list[dict[str, Any]], ranks: int, out: Path) -> list[tuple[dict[str, Any], ...]]:
    """What every rank wrote down, for each job."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(HERE / "save_worker.py"), mode, json.dumps(jobs), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert finished.returncode == 0, finished.stderr[-4000:]
    results = (json.loads((out / f"{mode}-{rank}.json").read_text()) for rank in range(ranks))
    return list(zip(*results, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[dict[str, Any], ...]]]:
    out = tmp_path_factory.mktemp("saved")
    results = run_ranks("save", SAVED, 4, out)
    return out, {job["name"]: ranks for job, ranks in zip(SAVED, results, strict=True)}


@pytest.mark.parametrize(("jobs", "count"), [(LOADED, 4), (LOADED_BY_TWO, 2)])
def test_another_layout_holds_the_truth_and_goes_on(saved, jobs, count):
    out, saves = saved
    for job, ranks in zip(jobs, run_ranks("load", jobs, count, out), strict=True):
        for rank in ranks:
            assert rank["wrong"] == [], job
            assert rank["compared"] > 40
            assert rank["step"] == 3
            assert rank["unused"] == ["seen"]
            assert rank["losses"] == pytest.approx(saves[job["source"]][0]["losses"], rel=1e-5), job


def test_stores_are_whole_and_bytes_are_dealt_evenly(saved):
    out, saves = saved
    for name, ranks in saves.items():
        assert ucp.verify(out / name).ok
        assert sorted(path.name for path in (out / name).iterdir()) == ["extra", "packs", "ucp.json"]
        planned = ranks[0]["planned"]
        index = ucp.inspect(out / name)
        counts = sum(atom.states["step"].nbytes for atom in index.atoms.values() if "step" in atom.states)
        assert sum(planned) == index.nbytes - counts  # every byte is written once
        assert [rank["written"] for rank in ranks] == planned
        if name == "ddp":  # every rank can write everything
            largest = max(atom.states["weight"].nbytes for atom in index.atoms.values())
            assert max(planned) - min(planned) <= largest
    assert str(ucp.inspect(out / "tp").topology) == "dp=2,tp=2"


def test_what_was_saved_converts_like_any_checkpoint(saved, tmp_path):
    out, _ = saved
    ucp.convert(out / "tp", tmp_path / "deepspeed", to="deepspeed", topology="dp=2,zero=1")
    assert ucp.diff(out / "tp", tmp_path / "deepspeed").equal


def test_kills_at_random_times_leave_the_chain_at_its_last_link(tmp_path):
    command = [sys.executable, str(HERE / "kill_worker.py"), str(tmp_path / "chain"), "50"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert int(finished.stdout) > 10


def test_experts_in_the_memory_of_a_process_that_still_runs_are_recovered(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(HERE / "snapshot_worker.py"), str(tmp_path / "chain")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert finished.stdout.count("is right") == 2
