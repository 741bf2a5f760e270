"""Runs of transformers that go on in torchtitan, and back, from what `ucp convert --to dcp --names` wrote.

Both frameworks' own models, optimizers and loading (`titan_worker.py`). That both compute the same, at once and after
two more steps, shows names, rows of queries and keys, stacked experts, and the optimizer's states under them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

WORKER = Path(__file__).with_name("titan_worker.py")
PAIRS = {"llama-2", "llama-3", "llama-3.2"}
"""Models of which torchtitan has rows of queries and keys in another order than transformers."""
STATES = {
    "llama-2": 84,
    "llama-3": 156,
    "llama-3.2": 81,
    "qwen3": 100,
    "qwen3-moe": 108,
    "deepseek-v2-lite": 108,
    "deepseek-v3": 125,
}
"""Model to the tensors in torchtitan's checkpoint of it, optimizer included."""


def interpreter() -> str:
    """Python with torchtitan 0.3 and transformers in it; no `make` target makes one."""
    other = os.environ.get("UCP_TORCHTITAN")
    if other is None and not all(map(importlib.util.find_spec, ("torchtitan", "transformers"))):
        pytest.skip("needs torchtitan 0.3 and transformers, here or where UCP_TORCHTITAN says")
    return other or sys.executable


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, float]]:
    command = [interpreter(), "-W", "ignore", str(WORKER), *STATES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    lines = (json.loads(line) for line in found.stdout.splitlines() if line.startswith("{"))
    return {own.pop("model"): own for own in lines}


@pytest.mark.parametrize("name", STATES)
def test_both_compute_the_same_and_train_on_alike(reports, name):
    """fp32 on two code paths: sums go in another order, so equal to rounding and no more."""
    own = reports[name]
    assert own["difference"] < 1e-5 * own["largest"]
    assert own["later"] < 1e-4 * own["largest"]
    assert own["back"] < 1e-4 * own["largest"]


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_another_order_of_rows_shows(reports, name):
    assert reports[name]["unordered"] > 0.01 * reports[name]["largest"]


@pytest.mark.parametrize("name", STATES)
def test_every_tensor_comes_back(reports, name):
    assert reports[name]["states"] == STATES[name]
