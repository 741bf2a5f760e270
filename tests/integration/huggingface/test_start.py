"""Runs that start from a model of Hugging Face, by way of `ucp convert --optimizer zero`.

DeepSpeed and FSDP2 go on from what was written as from the model itself, loaded by transformers, under a new optimizer.
megatron-core loads it and computes what transformers computes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import ucp

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
MODELS = HERE.parents[2] / "fixtures" / "huggingface"
MAKE = HERE.parents[2] / "fixtures" / "make" / "megatron"
RATE = 0.01


@pytest.fixture(scope="module")
def python() -> str:
    """Python with DeepSpeed and transformers in it; `make integration` makes one."""
    found = os.environ.get("UCP_TRANSFORMERS", sys.executable)
    done = subprocess.run([found, "-c", "import transformers, deepspeed"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs transformers and deepspeed, here or where UCP_TRANSFORMERS says")
    return found


def run(python: str, start: str, model: str, out: Path, *flags: str) -> dict[str, Any]:
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(HERE / "start_worker.py"), start, str(MODELS / model / "model"), str(out), *flags]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "to", "stage"),
    [
        ("llama", "deepspeed", 0),
        ("llama", "deepspeed", 1),
        ("gpt2-bin-sharded", "deepspeed", 2),
        ("llama-dcp", "deepspeed", 3),
        ("llama-sharded", "deepspeed", 1),
        ("llama-tied", "deepspeed-universal", 2),
        ("gpt2", "deepspeed-universal", 3),
    ],
)
def test_deepspeed_starts_as_from_the_model(python: str, model: str, to: str, stage: int, tmp_path: Path) -> None:
    topology = f"dp=2,zero={stage}" if to == "deepspeed" else None
    ucp.convert(
        MODELS / model / "model", tmp_path / "ckpt", to=to, topology=topology, optimizer="zero", settings={"lr": RATE}
    )
    asked = ["--stage", str(stage)]
    wanted = run(python, "published", model, tmp_path / "published.json", *asked)
    asked += ["--checkpoint", str(tmp_path / "ckpt"), *(["--universal"] if to != "deepspeed" else [])]
    found = run(python, "deepspeed", model, tmp_path / "converted.json", *asked)
    assert found == wanted
    assert found["lr"] == RATE


@pytest.mark.parametrize("model", ["llama", "llama-sharded"])
def test_fsdp_starts_as_from_the_model(python: str, model: str, tmp_path: Path) -> None:
    ucp.convert(
        MODELS / model / "model", tmp_path / "ckpt", to="dcp", topology="dp=2", optimizer="zero", settings={"lr": RATE}
    )
    wanted = run(python, "published", model, tmp_path / "published.json")
    found = run(python, "dcp", model, tmp_path / "converted.json", "--checkpoint", str(tmp_path / "ckpt"))
    assert found == wanted
    assert found["lr"] == RATE


@pytest.mark.parametrize("name", ["llama-3", "llama-3.2"])
def test_megatron_loads_it_and_computes_the_same(python: str, name: str, tmp_path: Path) -> None:
    """Sums in fp32 go in another order, so equal to rounding and no more."""
    spec = importlib.util.spec_from_file_location("megatron_versions", MAKE / "megatron_versions.py")
    assert spec is not None
    assert spec.loader is not None
    versions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(versions)
    environment = versions.environment("0.16.1")

    def worker(*arguments: object) -> str:
        command = [python, str(HERE / "logits_worker.py"), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    model, loaded = tmp_path / "model", tmp_path / "loaded.safetensors"
    worker("save", name, model)
    config = json.loads((model / "config.json").read_text())
    said = {
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "lr": RATE,
        "override_opt_param_scheduler": "true",
    }
    ucp.convert(model, tmp_path / "ckpt", to="megatron", topology="tp=2", optimizer="zero", settings=said)
    load = [sys.executable, str(MAKE / "megatron_load.py"), str(tmp_path / "ckpt" / "release"), "--layout", "tp2 dp2"]
    done = subprocess.run([*load, "--step", "0", "--dump", str(loaded)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    states = load_file(loaded)
    moments = [own for key, own in states.items() if key.endswith(("/exp_avg", "/exp_avg_sq"))]
    assert moments
    assert not any(own.any() for own in moments)
    own = json.loads(worker("compare", name, model, loaded).splitlines()[-1])
    assert own["difference"] < 1e-5 * own["largest"]
