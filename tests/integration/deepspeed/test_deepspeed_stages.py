"""Real DeepSpeed resumes pipelines with another number of stages: plain `load_checkpoint` of what `ucp convert` wrote.

Each rank of a run has the layers that DeepSpeed partitions to it, and right after the load holds their weights, moments
and buffers bit for bit as the run that was saved had them, with its hyper-parameters and steps; the losses of the next
steps are those of that run, uninterrupted, up to the order in which floats are summed. Runs of as many ranks share one
launch.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

from ucp_formats.deepspeed.write.pipeline.stages import balanced_bounds, uniform_bounds

import ucp
from tests.integration.deepspeed.deepspeed_cuts import Words, cut

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

WORKER = Path(__file__).with_name("stages_worker.py")
FIXTURES = Path(__file__).resolve().parents[3] / "fixtures" / "deepspeed"
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One conversion and load."""

    source: str
    """Fixture, or one of `OWN`."""
    run: str
    """Topology of the run that loads it."""
    universal: bool = False
    """Whether by way of a universal checkpoint."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What `--set` says."""
    partition: str | list[int] | None = None
    """How the run partitions its layers; None for what the model asks for."""
    case: Json = field(default_factory=dict)
    """What the run has otherwise than the one that wrote the source."""

    @property
    def name(self) -> str:
        said = "".join(f"-{name}-{text}" for name, text in self.settings.items())
        return f"{self.source}-to-{'universal-' if self.universal else ''}{self.run}{said}"

    @property
    def topology(self) -> ucp.Topology:
        return ucp.Topology.parse(self.run)

    @property
    def ranks(self) -> int:
        return self.topology.dp * self.topology.tp * self.topology.pp

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields of the fixture's case to replace."""
        tp, pp = self.topology.tp, self.topology.pp
        sizes = {"ranks": self.ranks, "model_parallel_size": pp * tp, "tensor_parallel_size": tp}
        return {**OWN.get(self.source, {}), **sizes, **self.case}


OWN: Mapping[str, Json] = {
    "chain-pp2": {"ranks": 4, "model_parallel_size": 2},
    "chain-pp1-fp16": {"ranks": 4, "model_parallel_size": 1, "dtype": "fp16"},
    "chain-pp1-unclipped": {"ranks": 4, "model_parallel_size": 1, "config": {"gradient_clipping": 0.0}},
}
"""Runs that are trained here, under DeepSpeed's default `partition_method`: name to fields of the worker's case."""
UNNAMED: Json = {"optimizer": "client-adamw"}
"""Torch takes no group without parameters, as a stage can have one, beside groups of named ones."""
BF16_OPTIMIZER: Json = {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}}
CHAIN = {"tied": "emb:11", "layers": "13"}
EMB, EMBED = {"tied": "emb:5"}, {"tied": "embed:5"}
DEFAULT, EVEN = {"partition": "parameters"}, {"partition": "uniform"}
AFFINE = {"partition": "type:1-3,5-6,8-9"}
CELLS = (
    # by DeepSpeed's default
    Cell("chain-pp2", "dp=1,pp=4,zero=1", settings=DEFAULT | CHAIN),
    Cell("chain-pp2", "dp=2,pp=1,zero=1"),
    Cell("chain-pp1-fp16", "dp=2,pp=2,zero=1", settings=DEFAULT | CHAIN),
    Cell("z1-pp2-tp2-dp2-bf16", "dp=1,pp=4,zero=1", settings=DEFAULT | EMBED, partition="parameters"),
    # evenly
    Cell("z1-pp2-dp2", "dp=1,pp=4,zero=0", settings=EVEN | EMB, case={"stage": 0}),
    Cell("z0-pp2", "dp=1,pp=3,zero=0", settings=EVEN | EMB, case=UNNAMED),
    Cell("z0-pp2-bf16", "dp=1,pp=3,zero=1", settings=EVEN | EMB, case=BF16_OPTIMIZER),
    Cell("chain-pp2", "dp=1,pp=4,zero=1", settings=EVEN | CHAIN, partition="uniform"),
    # other tensor-parallel degrees at once
    Cell("z1-pp4-tied", "dp=1,tp=2,pp=2,zero=1", settings=EVEN | EMBED),
    Cell("z1-pp2-tp2-dp2-bf16", "dp=1,tp=2,pp=1,zero=1"),
    # by type, and by bounds, at last those of DeepSpeed's default
    Cell("chain-pp1-fp16", "dp=1,pp=3,zero=1", settings=AFFINE | CHAIN, partition="type:Affine"),
    Cell("z1-pp4-tied", "dp=1,pp=3,zero=1", settings={"stages": "0,1,4,6"} | EMBED, partition=[0, 1, 4, 6]),
    Cell("chain-pp2", "dp=1,pp=3,zero=1", settings={"stages": "0,5,8,13", "tied": "emb:11"}),
    # universal
    Cell("chain-pp2", "dp=1,pp=4,zero=1", universal=True),
    Cell("z1-pp4-tied", "dp=1,pp=3,zero=1", universal=True),
    Cell("z1-pp2-tp2-dp2-bf16", "dp=1,pp=2,zero=1", universal=True),
)

NO_NORM: Json = {"config": {"gradient_clipping": 0.0, "zero_optimization": {"compute_grad_norm": False}}}


def uneven(source: str, zero: int, case: Json) -> Cell:
    """Three stages, one of which has parameters of one group, and the others of two."""
    run = f"dp=1,pp=3,zero={zero}"
    if source not in OWN:  # a layer of a norm alone
        return Cell(source, run, settings=EVEN | EMB, case=case)
    bounds = [0, 5, 11, 13]  # the tied embedding alone, at the end
    said, case = {"stages": ",".join(map(str, bounds)), "tied": "emb:11"}, {"stage": zero, **case}
    return Cell(source, run, settings=said, partition=bounds, case=case)


SUMS = (
    (uneven("z1-pp2-dp2", 1, {}), [2, 1, 2]),
    (uneven("z1-pp2-dp2", 0, {"stage": 0, **UNNAMED}), [1, 1, 1]),
    (uneven("z0-pp2-bf16", 1, {"stage": 1}), [3, 2, 3]),
    (uneven("z0-pp2-bf16", 1, BF16_OPTIMIZER), [1, 1, 1]),
    (uneven("chain-pp1-unclipped", 1, {}), [2, 2, 1]),
    (uneven("chain-pp1-unclipped", 1, NO_NORM), [0, 0, 0]),
    (uneven("chain-pp1-fp16", 1, {}), [3, 3, 2]),
    (uneven("chain-pp1-fp16", 0, {}), [3, 3, 2]),
)
"""A conversion and load, and the sums over all stages that a step takes on each of them: a run hangs where they differ.
But for fp32 and BF16_Optimizer, one of the sums is for the overflow."""

TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3}
"""Largest relative difference of a loss, by type in which the model computes."""
STAGE_0 = 1e-2
"""The same between a pipeline with and without ZeRO: 0.19.8 counts tied gradients twice in the norm that it clips by
without ZeRO."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folder of every source: `checkpoint`, and the truth about it."""
    out = tmp_path_factory.mktemp("sources")
    launch(4, [{"case": "chain", "overrides": own, "out": str(out / name)} for name, own in OWN.items()], out)
    names = [cell.source for cell in (*CELLS, *(cell for cell, _ in SUMS))]
    return {name: (out if name in OWN else FIXTURES) / name for name in names}


@pytest.fixture(scope="module")
def loaded(sources: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Cell to the folder with what its run held after the load."""
    out = tmp_path_factory.mktemp("loaded")
    for ranks in sorted({cell.ranks for cell in CELLS}):
        own = [cell for cell in CELLS if cell.ranks == ranks]
        jobs = [job(cell, write(cell, sources[cell.source], out / f"written-{cell.name}"), out) for cell in own]
        launch(ranks, jobs, out)
    return {cell.name: out / cell.name for cell in CELLS}


def write(cell: Cell, source: Path, path: Path) -> Path:
    """Convert; gives the folder."""
    ucp.convert(
        source / "checkpoint",
        path,
        to="deepspeed-universal" if cell.universal else "deepspeed",
        topology=None if cell.universal else cell.run,
        settings=cell.settings,
        workers=1,
        verify=True,
    )
    return path


def job(cell: Cell, checkpoint: Path, out: Path) -> dict[str, Any]:
    """The load as the worker takes it."""
    return {
        "case": "chain" if cell.source in OWN else cell.source,
        "overrides": cell.overrides,
        "partition": cell.partition,
        "load": str(checkpoint),
        "universal": cell.universal,
        "out": str(out / cell.name),
    }


def launch(ranks: int, jobs: list[dict[str, Any]], out: Path) -> None:
    """Carry out jobs with real DeepSpeed on so many ranks."""
    done = started(ranks, jobs, out)
    assert done.returncode == 0, done.stderr[-6000:]


def started(ranks: int, jobs: list[dict[str, Any]], out: Path) -> subprocess.CompletedProcess[str]:
    path = out / f"jobs-{ranks}.json"
    path.write_text(json.dumps(jobs))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DEEPSPEED_TIMEOUT": "3"}
    command = [*launcher, str(WORKER), str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_stage_holds_what_its_layers_are(cell: Cell, sources: Mapping[str, Path], loaded: Mapping[str, Path]) -> None:
    truths = sorted(loaded[cell.name].glob("truth*.safetensors"))
    assert len(truths) == cell.topology.pp * cell.topology.tp
    seen: set[str] = set()
    for rank, truth in enumerate(truths):
        seen |= check_rank(cell, sources[cell.source], truth, rank % cell.topology.tp)
    trained = {key for key in wholes(sources[cell.source]) if not key.endswith("/module")}
    assert seen >= trained
    check_run(cell, sources[cell.source], truths)


def check_rank(cell: Cell, source: Path, truth: Path, rank: int) -> set[str]:
    """Compare what a rank holds; gives the tensors of the source that it has something of."""
    whole = wholes(source)
    seen = set()
    with safe_open(truth, "np") as file:
        for key in file.keys():  # noqa: SIM118  # it is no dict
            name, _, state = key.rpartition("/")
            buffer = f"{name}/weight" not in whole
            if (state == "module" and not buffer) or (buffer and cell.universal):
                continue  # a master says more; a universal load leaves buffers as they are
            expected = cut(name, whole[key], rank, cell.topology.tp)
            np.testing.assert_array_equal(file.get_tensor(key), expected, err_msg=f"{truth.stem}: {key}", strict=True)
            seen.add(key)
    return seen


@cache
def wholes(source: Path) -> Mapping[str, Words]:
    """`NAME/STATE`, or `NAME/module` of a buffer, to the whole tensor: what the run that was saved held itself.

    Of tensor-parallel ranks, each of which held a part, what the atoms of the checkpoint are.
    """
    report = facts(source)
    found: dict[str, Words] = {}
    if report["case"].get("tensor_parallel_size", 1) > 1:
        checkpoint = ucp.open(source / "checkpoint")
        for name, atom in checkpoint.atoms.items():
            trained = "exp_avg" in atom.states
            for state in ("weight", "exp_avg", "exp_avg_sq") if trained else ("weight",):
                found[f"{name}/{state if trained else 'module'}"] = checkpoint.read(name, state).numpy()
        return found
    for truth in source.glob("truth*.safetensors"):
        with safe_open(truth, "np") as file:
            names = [key.removesuffix("/weight") for key in file.keys() if key.endswith("/weight")]  # noqa: SIM118
            kept = [key for key in file.keys() if not key.endswith("/module") or key[:-7] not in names]  # noqa: SIM118
            found |= {key: file.get_tensor(key) for key in kept}
    return found


@cache
def facts(folder: Path) -> dict[str, Any]:
    """What a run says of itself, on its first rank."""
    found: dict[str, Any] = json.loads(min(folder.glob("truth*.json")).read_text())
    return found


def check_run(cell: Cell, source: Path, truths: list[Path]) -> None:
    """Compare what the run says: hyper-parameters, steps and losses."""
    before, loaded = facts(source), json.loads(truths[0].with_suffix(".json").read_text())
    assert loaded["step"] == before["step"]
    stage = cell.case.get("stage", before["case"]["stage"])
    clipped_otherwise = (stage == 0) != (before["case"]["stage"] == 0)
    tolerance = STAGE_0 if clipped_otherwise else TOLERANCE[before["case"]["dtype"]]
    if cell.topology.tp == before["case"].get("tensor_parallel_size", 1) or before["case"]["kind"] != "3d":
        count = len(loaded["losses_after"])
        np.testing.assert_allclose(loaded["losses_after"], before["losses_after"][:count], rtol=tolerance)
    hyper = {}
    for report in [facts(source), *(json.loads(path.read_text()) for path in source.glob("truth*.json"))]:
        hyper |= {name: group for group in report["groups"] for name in group["names"]}
    for truth in truths:
        for group in json.loads(truth.with_suffix(".json").read_text())["groups"]:
            for name in group["names"]:
                assert named_apart(group) == named_apart(hyper[name]), name
            assert group["step"] == hyper[group["names"][0]]["step"]


def named_apart(group: Json) -> dict[str, Any]:
    """Hyper-parameters but for torch's `param_names`, which are those of one stage."""
    own: dict[str, Any] = dict(group["hyperparameters"])
    own.pop("param_names", None)
    return own


@pytest.mark.parametrize(
    ("source", "topology", "case", "error"),
    [
        ("z1-pp4-tied", "dp=1,pp=2,zero=1", {}, "The ZeRO checkpoint parameter-alignment layout does not match"),
        ("z0-pp2-bf16", "dp=1,pp=2,zero=1", BF16_OPTIMIZER, "The size of tensor a (8) must match the size of tensor b"),
        ("z0-pp2", "dp=1,pp=2,zero=0", {}, "a parameter group that doesn't match the size of optimizer's group"),
    ],
)
def test_a_run_of_other_stages_fails_to_load(
    source: str, topology: str, case: Json, error: str, tmp_path: Path
) -> None:
    said = {"stages": "0,2,6", **(EMBED if source == "z1-pp4-tied" else EMB)}
    cell = Cell(source, topology, settings=said, partition=[0, 4, 6], case=case)
    written = write(cell, FIXTURES / source, tmp_path / "written")
    done = started(2, [job(cell, written, tmp_path)], tmp_path)
    assert done.returncode != 0
    assert "in load_checkpoint" in done.stderr
    assert error in done.stderr


@pytest.fixture(scope="module")
def sums(sources: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """For each of `SUMS`, the sums over all stages that real DeepSpeed takes in a step, by stage."""
    out = tmp_path_factory.mktemp("sums")
    jobs = []
    for number, (cell, _) in enumerate(SUMS):
        path = write(cell, sources[cell.source], out / f"written-{number}")
        jobs.append({**job(cell, path, out), "out": str(out / str(number)), "count_sums": True})
    launch(3, jobs, out)
    folders = [out / str(number) for number in range(len(SUMS))]
    return [[int(path.read_text()) for path in sorted(own.glob("sums-*"))] for own in folders]


def test_stages_take_as_many_sums_as_they_have_groups(sums: list[list[int]]) -> None:
    assert sums == [expected for _, expected in SUMS]


def test_layers_are_partitioned_as_deepspeed_does() -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    draw = random.Random(0)
    for _ in range(300):
        weights = [draw.choice([0, 1, 16, 72, draw.randint(0, 900)]) for _ in range(draw.randint(1, 12))]
        stages = draw.randint(1, 8)
        assert balanced_bounds(weights, stages) == tuple(map(int, partition_balanced(weights, stages)))
        assert uniform_bounds(len(weights), stages) == tuple(map(int, partition_uniform(len(weights), stages)))
