"""Families' names and joins against the models: transformers and megatron-core compute the same from the same weights.

Both are run on what transformers saved, and megatron-core on what the family's rules made of it. So a name, an order of
queries, keys and values, a gate or a transposition that is wrong shows, also where no shape tells.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WORKER = Path(__file__).with_name("forward_worker.py")
FIXTURES = Path(__file__).parents[3] / "fixtures"
MAKE = FIXTURES / "make" / "megatron"
NAMES = json.loads((FIXTURES / "huggingface" / "names-5.23.0.json").read_text())["models"]

NOT_RUN = {
    "gpt2-base": "no head, so no logits",
    "bloom-base": "no head, so no logits",
    "bloom": "megatron-core has no ALiBi",
    "qwen2-tied": "as qwen2 and llama-3.2",
    "qwen3-tied": "as qwen3 and llama-3.2",
    "deepseek-v3-mtp": "made by hand out of deepseek-v3",
    "deepseek-v3-mtp-lite": "made by hand out of deepseek-v3",
    "nemotron-h": "megatron-core's Mamba runs on a GPU only",
    "nemotron-h-moe": "megatron-core's Mamba runs on a GPU only",
}
"""Model to why it is not run here."""
RUN = [name for name in NAMES if name not in NOT_RUN]

GROUPED = {"gpt", "llama", "qwen2", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek-moe"}
"""Families of which queries, keys and values are apart in Hugging Face, and go by group in Megatron."""


def interpreter() -> str:
    """Python with transformers in it; `make integration` makes one."""
    other = os.environ.get("UCP_TRANSFORMERS")
    if other is None and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers, here or where UCP_TRANSFORMERS says; `make integration` installs it")
    return other or sys.executable


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, float]]:
    spec = importlib.util.spec_from_file_location("megatron_versions", MAKE / "megatron_versions.py")
    versions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(versions)
    command = [interpreter(), str(WORKER), *RUN]
    found = subprocess.run(
        command, env=versions.environment("0.16.1"), capture_output=True, text=True, check=False, timeout=600
    )
    assert found.returncode == 0, found.stderr[-4000:]
    lines = (json.loads(line) for line in found.stdout.splitlines() if line.startswith("{"))
    return {own.pop("model"): own for own in lines}


@pytest.mark.parametrize("name", RUN)
def test_both_compute_the_same(reports, name):
    """fp32 on two code paths: sums go in another order, so equal to rounding and no more."""
    own = reports[name]
    assert own["difference"] < 1e-5 * own["largest"]


@pytest.mark.parametrize("name", [name for name in RUN if NAMES[name]["family"] in GROUPED])
def test_another_order_of_queries_keys_and_values_shows(reports, name):
    assert reports[name]["unordered"] > 0.1 * reports[name]["largest"]


def test_what_is_not_run_is_known():
    assert set(NOT_RUN) < set(NAMES)
    assert {NAMES[name]["family"] for name in NOT_RUN} - {NAMES[name]["family"] for name in RUN} == {
        "bloom",
        "mcore-hybrid",
    }
