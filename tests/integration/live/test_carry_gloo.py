"""The exchange in real processes over gloo: tp=2, dp=2, where every rank holds other things than its fellows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
ATOM = 1200 * 256 * 4
"""Bytes of a tensor."""
LAYERS = 6
COUNT = 4

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("carry") / "shard.bin"
    np.random.default_rng(1).normal(size=LAYERS * ATOM).astype(np.float32).tofile(path)
    return path


def start(checkpoint, out, mode):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(COUNT)]
    launcher += ["--monitor-interval", "5"]  # of the watch that ends all ranks when one dies: they are to write first
    command = [*launcher, str(HERE / "carry_worker.py"), str(checkpoint), str(out), mode]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


@pytest.fixture(scope="module")
def results(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    done = start(checkpoint, out, "")
    assert done.returncode == 0, done.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(COUNT)]


@pytest.mark.parametrize("exchange", ["auto", "always", "never"])
def test_every_rank_holds_its_slice(results, exchange):
    assert [own[exchange]["wrong"] for own in results] == [[]] * COUNT


def test_each_byte_is_read_once_or_by_all_that_hold_it(results):
    """norm is held by 4 ranks, halves of up and down by 2 each, quarters of moment by one."""
    assert {own["always"]["total"] for own in results} == {LAYERS * 4 * ATOM}
    assert {own["never"]["wanted"] for own in results} == {LAYERS * (4 + 2 + 2 + 1) * ATOM}
    assert {own["never"]["received"] for own in results} == {0}
    for own in results:
        assert own["always"]["received"] >= LAYERS * (3 / 4 + 2 / 4) * ATOM
        assert own["always"]["peak"] <= 4 << 20


def test_a_failure_of_one_rank_in_several_sets_is_raised_by_all(results):
    assert {own["failed"]["kind"] for own in results} == {"MissingFileError"}
    (text,) = {own["failed"]["text"] for own in results}
    assert text.startswith("rank 1 of 4: expected a file at")


def test_when_a_rank_dies_the_others_are_told(checkpoint, tmp_path):
    done = start(checkpoint, tmp_path, "kill")
    assert done.returncode != 0
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("bereft*.json"))]
    assert told, done.stderr
    for own in told:
        assert own["text"].startswith("LoadError: expected an answer from ranks ")
        assert "init_process_group(timeout=...)" in own["text"]
        assert own["seconds"] < 60
