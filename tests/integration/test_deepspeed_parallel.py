"""Real DeepSpeed resumes pipeline, tensor- and expert-parallel runs from what `ucp convert` wrote, at other degrees.

Right after the load every rank holds the cuts of the source that its place asks for, weights and moments bit for bit,
with the source's hyper-parameters and steps; the losses of the next steps are those of the uninterrupted run, up to the
order in which floats are summed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

pytest.importorskip("deepspeed", reason="needs DeepSpeed; `make integration` installs it")

import ucp

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")
EXPERTS = 4
"""In the model of the fixtures."""
Words = NDArray[Any]


def autotp(degree: int) -> dict[str, Any]:
    specs = [
        {"patterns": [r".*\.(q|k|v|up)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(o|down)\.weight$"], "partition_type": "row"},
    ]
    partition = {"use_default_specs": False, "layer_specs": specs}
    return {"config": {"tensor_parallel": {"autotp_size": degree, "partition_config": partition}}}


def grid(ranks: int, mp: int, tp: int = 1) -> dict[str, Any]:
    return {"ranks": ranks, "model_parallel_size": mp, "tensor_parallel_size": tp}


@dataclass(frozen=True, slots=True)
class Cell:
    """One conversion and load."""

    source: str
    topology: str
    """Empty for a universal checkpoint."""
    ranks: int
    case: Mapping[str, Any] = field(default_factory=dict)
    """What the run that loads it has otherwise than the one that wrote the source."""

    @property
    def name(self) -> str:
        run = "-".join(str(value) for value in self.case.values() if isinstance(value, int))
        return f"{self.source}-to-{self.topology or f'universal-{run}'}"


BF16_OPTIMIZER = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}
CELLS = (
    Cell("z1-pp2-tp2-dp2-bf16", "dp=1,tp=2,pp=2,zero=1", 4, grid(4, 4, 2)),
    Cell("z1-pp2-tp2-dp2-bf16", "dp=2,tp=1,pp=2,zero=1", 4, grid(4, 2)),
    Cell("z1-pp2-tp2-dp2-bf16", "dp=1,tp=4,pp=1,zero=1", 4, grid(4, 4, 4)),
    Cell("z1-pp2-tp2-dp2-bf16", "", 4, grid(4, 4, 2)),
    Cell("z1-pp2-tp2-dp2-bf16", "", 4, grid(4, 2, 2)),
    Cell("z1-pp2-tp2-dp2-bf16", "", 3, grid(3, 3)),
    Cell("z1-pp2-tp2-dp2-bf16", "", 2, grid(2, 1)),
    Cell("z1-pp4-tied", "dp=1,pp=4,zero=1", 4),
    Cell("z1-pp4-tied", "dp=3,zero=1", 3, grid(3, 1)),
    Cell("z1-pp4-tied", "", 4, grid(4, 4, 2)),
    Cell("z1-pp2-dp2", "dp=1,pp=2,zero=1", 2, {"ranks": 2}),
    Cell("z1-pp2-dp2", "dp=2,pp=2,zero=0", 4, {"stage": 0}),
    Cell("z0-pp2", "dp=2,pp=2,zero=1", 4, {"stage": 1}),
    Cell("z0-pp2-bf16", "dp=1,pp=2,zero=1", 2, {"ranks": 2, "stage": 1, **BF16_OPTIMIZER}),
    Cell("z1-tp2-dp2", "dp=1,tp=2,zero=1", 2, {"ranks": 2}),
    Cell("z1-tp2-dp2", "dp=1,tp=4,zero=2", 4, {**grid(4, 4), "stage": 2, **autotp(4)}),
    Cell("z1-tp2-dp2", "dp=2,tp=2,zero=3", 4, {"stage": 3}),
    Cell("z1-tp2-dp2", "dp=2,tp=2,zero=0", 4, {"stage": 0}),
    Cell("z3-tp2-dp2", "dp=1,tp=4,zero=3", 4, {**grid(4, 4), **autotp(4)}),
    Cell("z3-tp2-dp2", "dp=2,tp=2,zero=1", 4, {"stage": 1}),
    Cell("z1-tp2-dp2", "", 4, {**grid(4, 4), **autotp(4)}),
    Cell("z1-ep2-dp4", "dp=4,ep=2,zero=1", 4),
    Cell("z1-ep2-dp4", "dp=4,ep=4,zero=2", 4, {"stage": 2, "expert_parallel_size": 4}),
    Cell("z1-ep2-dp4", "dp=2,ep=1,zero=1", 2, {"ranks": 2, "expert_parallel_size": 1}),
    Cell("z1-ep2-dp4", "dp=4,ep=4,zero=0", 4, {"stage": 0, "expert_parallel_size": 4}),
    Cell("z2-ep2-dp4-contiguous", "dp=4,ep=2,zero=2", 4),
    Cell("z0-ep2-dp4", "dp=2,ep=2,zero=1", 2, {"ranks": 2, "stage": 1}),
    Cell("z1-ep2-dp4-bf16", "dp=4,ep=2,zero=1", 4),
    Cell("z1-ep2-dp4", "", 2, {"ranks": 2, "expert_parallel_size": 1}),
)

DIM = (
    (re.compile(r"tied_modules\.embed\."), 0, (1,)),
    (re.compile(r"\d+\.qkv\."), 0, (2, 1, 1)),
    (re.compile(r"\d+\.gate_up\."), 0, (1, 1)),
    (re.compile(r"\d+\.(dense|down)\.weight"), 1, (1,)),
    (re.compile(r"block\.(q|k|v|up)\."), 0, (1,)),
    (re.compile(r"block\.(o|down)\.weight"), 1, (1,)),
)
"""Names, the dim they are cut along, and the relative lengths of blocks that are each cut on their own."""

TOLERANCE = {"autotp": 1e-4, "pipeline": 1e-4, "3d": 2e-2, "moe": 1e-2}
"""Largest relative difference of a loss, by kind of model. The 3D model trains a scale on each rank, which a conversion
averages; it mixes what a tensor-parallel rank has: at another degree it is another model, and no loss is compared.
An expert drops the tokens of a rank that are too many for it, so that losses depend on the number of ranks."""

STAGE_0 = 3e-2
"""The same between a pipeline with and without ZeRO: 0.19.8 counts tied gradients twice in the norm that it clips by
without ZeRO."""


def cut(name: str, whole: Words, rank: int, tp: int) -> Words:
    """What a tensor-parallel rank has of a tensor."""
    found = next(((dim, blocks) for pattern, dim, blocks in DIM if pattern.match(name)), None)
    if found is None or tp == 1:
        return whole
    dim, blocks = found
    length = whole.shape[dim] // sum(blocks)
    edges = [length * sum(blocks[:number]) for number in range(1, len(blocks))]
    return np.concatenate([np.split(part, tp, axis=dim)[rank] for part in np.split(whole, edges, axis=dim)], axis=dim)


@cache
def source(name: str) -> ucp.Checkpoint:
    return ucp.open(FIXTURES / "deepspeed" / name / "checkpoint")


@cache
def report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(min((FIXTURES / "deepspeed" / name).glob("truth-*.json")).read_text())
    return found


def load(cell: Cell, checkpoint: Path, out: Path) -> None:
    """Load it with real DeepSpeed; `out` gets the truth of every rank after the load."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell.ranks)]
    config = dict(cell.case)
    command = [*launcher, str(FIXTURES / "deepspeed_train.py"), "--case", cell.source, "--resume", str(checkpoint)]
    command += ["--case-config", json.dumps(config), "--out", str(out), *([] if cell.topology else ["--universal"])]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DEEPSPEED_TIMEOUT": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_rank_holds_what_its_place_asks_for(cell: Cell, tmp_path: Path) -> None:
    target = "deepspeed" if cell.topology else "deepspeed-universal"
    topology = ucp.Topology.parse(cell.topology) if cell.topology else None
    path = FIXTURES / "deepspeed" / cell.source / "checkpoint"
    ucp.convert(path, tmp_path / "written", to=target, topology=topology, workers=1, verify=True)
    load(cell, tmp_path / "written", tmp_path / "out")
    truths = sorted((tmp_path / "out").glob("truth*.safetensors"))
    assert truths
    seen: set[str] = set()
    for rank, truth in enumerate(truths):
        seen |= check_rank(cell, truth, rank, of=len(truths))
    trained = {name for name, atom in source(cell.source).atoms.items() if "exp_avg" in atom.states}
    assert seen >= trained
    check_run(cell, json.loads(truths[0].with_suffix(".json").read_text()))


def check_rank(cell: Cell, truth: Path, rank: int, *, of: int) -> set[str]:
    """Compare what a rank holds; gives the names of the source that it has something of."""
    tp = int(cell.case.get("tensor_parallel_size", 0)) or report(cell.source)["case"].get("tensor_parallel_size", 1)
    if report(cell.source)["case"]["kind"] == "autotp":
        tp = of
    seen = set()
    with safe_open(truth, "pt") as file:
        for key in file.keys():  # noqa: SIM118  # it is no dict
            name, _, state = key.rpartition("/")
            found = EXPERT.fullmatch(name)
            name = f"{found[1]}{rank * (EXPERTS // of) + int(found[2])}{found[3]}" if found else name
            atom = source(cell.source).atoms[name]
            buffer = "exp_avg" not in atom.states
            if (state == "module" and not buffer) or (buffer and not cell.topology):
                continue
            tensor = source(cell.source).read(name, "weight" if buffer else state)
            expected = cut(name, tensor.numpy(), rank % tp, tp)
            np.testing.assert_array_equal(file.get_tensor(key).numpy(), expected, err_msg=f"{truth.stem}: {key}")
            seen.add(name)
    return seen


def check_run(cell: Cell, loaded: dict[str, Any]) -> None:
    """Compare what the run says: hyper-parameters, steps and losses."""
    before = report(cell.source)
    assert loaded["step"] == before["step"]
    kind, stage = before["case"]["kind"], cell.case.get("stage", before["case"]["stage"])
    clipped_otherwise = kind == "pipeline" and (stage == 0) != (before["case"]["stage"] == 0)
    tolerance = STAGE_0 if clipped_otherwise else TOLERANCE[kind]
    if kind != "3d" or loaded["case"]["tensor_parallel_size"] == before["case"]["tensor_parallel_size"]:
        np.testing.assert_allclose(loaded["losses_after"], before["losses_after"], rtol=tolerance)
    index = ucp.inspect(FIXTURES / "deepspeed" / cell.source / "checkpoint")
    hyper = {name: group.hyper for group in index.groups for name in group.params}
    for group in loaded["groups"]:
        name = group["names"][0]
        if EXPERT.fullmatch(name) is None:
            wanted = json.loads(json.dumps(hyper[name]))
            if cell.topology or stage < 3:
                assert {key: group["hyperparameters"].get(key) for key in wanted} == wanted
        assert group["step"] == before["groups"][0]["step"]
