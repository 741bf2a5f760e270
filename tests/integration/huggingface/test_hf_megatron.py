"""A model of megatron-core, published by `--to huggingface` alone, computes in transformers what it computed itself.

config.json is derived from the recorded arguments, none of which is what transformers takes by default; names, fused
projections and padding follow the family. Both compute in float32, on two code paths: equal to rounding.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import ucp

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

WORKER = Path(__file__).with_name("megatron_worker.py")
MAKE = Path(__file__).parents[3] / "fixtures" / "make" / "megatron"
CLASSES = {
    "llama": "LlamaForCausalLM",
    "llama-3.1": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "gpt": "GPT2LMHeadModel",
    "deepseek-v2": "DeepseekV2ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
}
TOKENS = 51
"""True vocabulary of the runs, with the token that ends a text; the embeddings have 64 rows."""
ROUNDING = 1e-5
"""Largest difference, relative to the largest logit."""


def interpreter() -> str:
    """Python with transformers in it; `make integration` makes one."""
    other = os.environ.get("UCP_TRANSFORMERS")
    if other is None and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers, here or where UCP_TRANSFORMERS says; `make integration` installs it")
    return other or sys.executable


def run(what: str, folder: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("megatron_versions", MAKE / "megatron_versions.py")
    versions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(versions)
    command = [interpreter(), str(WORKER), what, str(folder), *names]
    env = versions.environment("0.16.1")
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert found.returncode == 0, found.stderr[-4000:]
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of every model, and what was made of it."""
    folder = tmp_path_factory.mktemp("megatron")
    run("make", folder, CLASSES)
    for name in CLASSES:
        ucp.convert(folder / name / "checkpoint", folder / name / "hf", to="huggingface", verify=True)
    return folder


@pytest.fixture(scope="module")
def told(published: Path) -> dict[str, dict[str, Any]]:
    return {own["model"]: own for own in run("load", published, CLASSES)}


@pytest.mark.parametrize("name", CLASSES)
def test_both_compute_the_same(name: str, told: dict[str, dict[str, Any]]) -> None:
    own = told[name]
    assert (own["class"], own["vocabulary"], own["keys"]) == (CLASSES[name], TOKENS, [])
    assert own["largest"] > 1
    assert own["difference"] < ROUNDING * own["largest"]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama", {"rms_norm_eps": 1e-6}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama-3.1", {"rope_parameters": {"rope_type": "default", "rope_theta": 25000.0}}),
        ("gpt", {"activation_function": "gelu_new"}),
        ("gpt", {"layer_norm_epsilon": 1e-5}),
        ("qwen3-moe", {"norm_topk_prob": True}),
        ("deepseek-v3", {"routed_scaling_factor": 1.0}),
    ],
)
def test_another_value_would_show(name: str, changed: dict[str, Any], published: Path, tmp_path: Path) -> None:
    shutil.copytree(published / name, tmp_path / name)
    config = tmp_path / name / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    (own,) = run("load", tmp_path, [name])
    assert own["difference"] > 10 * ROUNDING * own["largest"]
