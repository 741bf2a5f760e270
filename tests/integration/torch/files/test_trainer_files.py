"""The Trainer of transformers without DeepSpeed: what it saves is read, and goes on over DeepSpeed.

Its optimizer numbers parameters, and its weights are in safetensors, which sorts names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ucp
from ucp.contract.model import MODEL_TYPES, sort_in_model_order

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("plain_trainer_worker.py")
NEEDED = ("deepspeed", "transformers", "accelerate")


@pytest.fixture(scope="module")
def python() -> str:
    """Python with everything in it; `make integration` makes one."""
    found = os.environ.get("UCP_TRANSFORMERS", sys.executable)
    missing = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, {NEEDED})))"
    if subprocess.run([found, "-c", missing], check=False).returncode:
        pytest.skip(f"needs {', '.join(NEEDED)}, here or where UCP_TRANSFORMERS says; `make integration` installs them")
    return found


def run(python: str, *asked: object, launched: bool = False) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"] if launched else []
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, *launch, str(WORKER), *map(str, asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


def test_orders_are_those_of_the_models(python: str, tmp_path: Path) -> None:
    run(python, "order", tmp_path / "orders.json", *MODEL_TYPES)
    for kind, names in json.loads((tmp_path / "orders.json").read_text()).items():
        assert sort_in_model_order(sorted(names), kind) == names, kind


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_run_goes_on_over_deepspeed(python: str, kind: str, tmp_path: Path) -> None:
    run(python, "train", tmp_path / "plain", kind)
    saved = tmp_path / "plain" / "checkpoint-3"
    checkpoint, truth = ucp.open(saved), load_file(tmp_path / "plain" / "truth.safetensors")
    assert {f"{atom.name}/{state}" for atom, state, _ in checkpoint.index.states()} == truth.keys()
    for name, wanted in truth.items():
        param, _, state = name.rpartition("/")
        assert torch.equal(checkpoint.read(param, state), wanted), name
    written = tmp_path / "written" / "checkpoint-3"
    written.parent.mkdir()
    ucp.convert(saved, written, to="deepspeed", topology="dp=1,zero=1", verify=True)
    run(python, "resume", tmp_path / "again", kind, written, launched=True)
    wanted, found = (json.loads((tmp_path / own / "losses.json").read_text()) for own in ("plain", "again"))
    for step in ("4", "5", "6"):
        assert found[step] == pytest.approx(wanted[step], rel=1e-3)


def test_an_order_that_nobody_knows_is_refused(python: str, tmp_path: Path) -> None:
    run(python, "train", tmp_path / "plain", "llama")
    saved = tmp_path / "plain" / "checkpoint-3"
    (saved / "config.json").unlink()
    unnamed = ucp.inspect(saved).unnamed
    assert unnamed is not None
    assert "safetensors keeps names sorted" in unnamed.reason
    with pytest.raises(ucp.errors.MissingStateError, match="--shapes-from"):
        ucp.plan(saved, to="torch")
    names = [name for name in load_file(tmp_path / "plain" / "truth.safetensors") if name.endswith("/weight")]
    ordered = sort_in_model_order([name.removesuffix("/weight") for name in names], "llama")
    assert ordered is not None
    (tmp_path / "shapes.json").write_text(json.dumps({name: [1] for name in ordered}))
    read = ucp.open(saved, shapes_from=tmp_path / "shapes.json")
    truth = load_file(tmp_path / "plain" / "truth.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(read.read(name, "exp_avg"), truth[f"{name}/exp_avg"])
