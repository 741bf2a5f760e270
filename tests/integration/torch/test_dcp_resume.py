"""Runs of FSDP, tensor parallelism and DDP that go on from what `--to dcp` wrote, and runs of DeepSpeed from theirs.

Every resume is by the real framework in a model of another seed (`fixtures/make/torch/torch_train.py`,
`fixtures/make/deepspeed/deepspeed_train.py`). What it holds after the load is compared bit for bit, and its losses with
those of the run that was never interrupted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ucp

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
MAKE = FIXTURES / "make"
RANKS = {
    "fsdp2-dp4": 4,
    "hsdp-dp2x2": 4,
    "ddp-dp2": 2,
    "fsdp2-dp2-full": 2,
    "fsdp2-dp2-tp2": 4,
    "fsdp2-dp4-titan": 4,
    "fsdp2-pp2-dp2": 4,
}

pytestmark = pytest.mark.integration


def ranks(number: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]


def run(command: list[str]) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def resumed(case: str, checkpoint: Path, out: Path, *flags: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    train = [str(MAKE / "torch" / "torch_train.py"), "--case", case, "--resume", str(checkpoint), "--out", str(out)]
    run([*ranks(RANKS[case]), *train, *flags])
    return json.loads((out / "truth.json").read_text()), load_file(out / "truth.safetensors")


def check(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        assert torch.equal(tensor, truth[name].reshape(tensor.shape)), name


def truth_of(kind: str, case: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    folder = FIXTURES / kind / case
    return json.loads((folder / "truth.json").read_text()), load_file(folder / "truth.safetensors")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp2-dp4", "hsdp-dp2x2"),
        ("hsdp-dp2x2", "fsdp2-dp4"),
        ("ddp-dp2", "fsdp2-dp4-titan"),
        ("fsdp1-dp4", "ddp-dp2"),
        ("fsdp2-dp4-titan", "fsdp2-dp4"),
    ],
)
def test_one_way_of_training_goes_on_in_another(source: str, target: str, tmp_path: Path) -> None:
    style = "torchtitan" if target.endswith("titan") else "nested"
    written = tmp_path / "written"
    ucp.convert(
        FIXTURES / "torch" / source / "checkpoint", written, to="dcp", topology="dp=3", settings={"style": style}
    )
    report, found = resumed(target, written, tmp_path / "out")
    wanted, truth = truth_of("torch", source)
    check(found, truth)
    assert report["losses_after"] == pytest.approx(wanted["losses_after"], rel=1e-5)


@pytest.mark.parametrize(("source", "target"), [("fsdp2-pp2-dp2", "fsdp2-dp2-tp2"), ("fsdp2-dp2-tp2", "fsdp2-pp2-dp2")])
def test_pipelines_and_tensor_parallelism(source: str, target: str, tmp_path: Path) -> None:
    style = "flattened" if "pp2" in target else "nested"
    written = tmp_path / "written"
    ucp.convert(FIXTURES / "torch" / source / "checkpoint", written, to="dcp", settings={"style": style})
    report, found = resumed(target, written, tmp_path / "out")
    wanted, truth = truth_of("torch", source)
    check(found, truth)
    assert report["losses_after"] == pytest.approx(wanted["losses_after"], rel=1e-5)


@pytest.mark.parametrize(
    ("source", "target"), [("z1-dp4-fp32", "fsdp2-dp4"), ("z3-dp4-fp32", "hsdp-dp2x2"), ("z3-dp4-fp32", "ddp-dp2")]
)
def test_a_deepspeed_run_goes_on_in_torch(source: str, target: str, tmp_path: Path) -> None:
    written = tmp_path / "written"
    ucp.convert(FIXTURES / "deepspeed" / source / "checkpoint", written, to="dcp", topology="dp=2")
    report, found = resumed(target, written, tmp_path / "out", "--foreign")
    wanted, truth = truth_of("deepspeed", source)
    assert torch.equal(found.pop("head.weight/weight"), found["emb.weight/weight"])
    masters = {name: truth.get(name, truth.get(name.replace("/weight", "/module"))) for name in found}
    check({name: own for name, own in found.items() if not name.endswith("/step")}, masters)
    assert {float(own) for name, own in found.items() if name.endswith("/step")} == {3.0}
    assert report["losses_after"] == pytest.approx(wanted["losses_after"], rel=1e-5)


@pytest.mark.parametrize(
    ("source", "case", "topology"),
    [
        ("fsdp2-dp4", "z1-dp4-fp32", "dp=2,zero=1"),
        ("ddp-dp2", "z1-dp4-fp32", "dp=2,zero=1"),
        ("hsdp-dp2x2", "z3-dp4-fp32", "dp=2,zero=3"),
        ("fsdp1-dp4", "z3-dp4-fp32", "dp=2,zero=3"),
    ],
)
def test_a_torch_run_goes_on_in_deepspeed(source: str, case: str, topology: str, tmp_path: Path) -> None:
    written, out = tmp_path / "written", tmp_path / "out"
    ucp.convert(FIXTURES / "torch" / source / "checkpoint", written, to="deepspeed", topology=topology)
    train = [str(MAKE / "deepspeed" / "deepspeed_train.py"), "--case", case, "--resume", str(written)]
    run([*ranks(2), *train, "--case-config", json.dumps({"omit": ["scalar", "void"]}), "--out", str(out)])
    _, truth = truth_of("torch", source)
    found = load_file(out / "truth.safetensors")
    trained = {name: own for name, own in found.items() if not name.endswith(("/module", "/step"))}
    assert trained
    check(trained, truth)


def test_ranks_of_fsdp_and_tensor_parallelism_read_only_what_is_theirs(tmp_path: Path) -> None:
    written, out = tmp_path / "written", tmp_path / "out"
    source, rules = FIXTURES / "torch" / "fsdp2-pp2-dp2" / "checkpoint", FIXTURES / "deepspeed" / "autotp.toml"
    ucp.convert(source, written, to="dcp", topology="dp=2,tp=2", patterns=rules)
    assert str(ucp.inspect(written).topology) == "dp=2,tp=2"
    worker = Path(__file__).with_name("reads_worker.py")
    case = ["--case", "fsdp2-dp2-tp2", "--checkpoint", str(written), "--out", str(out)]
    run([*ranks(4), str(worker), *case])
    for rank in range(4):
        report = json.loads((out / f"{rank}.json").read_text())
        assert len(report["read"]) == 3 * report["tensors"]  # weight and two moments, one chunk of each
        assert all(own["whole"] for own in report["read"])
        peers = Counter(own["file"] for own in report["read"])
        assert set(peers) <= {f"__{rank}_0.distcp", f"__{rank ^ 1}_0.distcp"}
        assert peers[f"__{rank}_0.distcp"] >= 3 * report["two_dims"]  # what tensor parallelism cuts, nobody else has
