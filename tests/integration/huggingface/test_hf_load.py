"""transformers loads what `--to huggingface` wrote: no key is missing or left over, and logits are the same.

Bit for bit those of the model that was trained, under FSDP2 and under DeepSpeed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ucp

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

WORKER = Path(__file__).with_name("hf_worker.py")
NEEDED = ("deepspeed", "transformers")
CASES = [("fsdp2", "llama-tied"), ("fsdp2", "gpt2"), ("deepspeed", "qwen2"), ("deepspeed", "gemma")]


@pytest.fixture(scope="module")
def python() -> str:
    """Python with everything in it; `make integration` makes one."""
    found = os.environ.get("UCP_TRANSFORMERS", sys.executable)
    missing = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, {NEEDED})))"
    if subprocess.run([found, "-c", missing], check=False).returncode:
        pytest.skip(f"needs {', '.join(NEEDED)}, here or where UCP_TRANSFORMERS says; `make integration` installs them")
    return found


def run(*command: object) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"}
    found = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, check=False, timeout=600)
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


@pytest.fixture(scope="module")
def trained(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Folders of the models, each trained by two ranks."""
    found = {}
    for kind, model in CASES:
        found[kind, model] = folder = tmp_path_factory.mktemp(f"{kind}-{model}")
        run(python, "-m", "torch.distributed.run", "--nproc-per-node", 2, WORKER, "train", kind, model, folder)
    return found


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_logits_of_the_trained_model(
    case: tuple[str, str], size: str, trained: dict[tuple[str, str], Path], python: str
) -> None:
    folder = trained[case]
    out = folder / f"out-{size}"
    settings = {"config": str(folder / "model"), "max_shard_size": size}
    ucp.convert(folder / "checkpoint", out, to="huggingface", settings=settings)
    told = json.loads(run(python, WORKER, "load", out).splitlines()[-1])
    assert {key: own for key, own in told.items() if key.endswith(("_keys", "_msgs"))} == {
        "missing_keys": [],
        "unexpected_keys": [],
        "mismatched_keys": [],
        "error_msgs": [],
    }
    assert told["dtype"] == {"fsdp2": "torch.float32", "deepspeed": "torch.bfloat16"}[case[0]]
    assert ("model.safetensors" in told["files"]) == (size == "5GB")
    assert opened(out) == {"format": "pt"}
    assert torch.equal(torch.load(out.with_suffix(".logits.pt")), torch.load(folder / "logits.pt"))


def opened(folder: Path) -> dict[str, Any]:
    """Read every tensor of every file by safetensors itself; the metadata that all of them have."""
    found = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert all(isinstance(file.get_tensor(name), torch.Tensor) for name in sorted(file.keys()))
            found.append(file.metadata())
    assert all(own == found[0] for own in found)
    return found[0]
