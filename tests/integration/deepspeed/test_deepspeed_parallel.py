"""Real DeepSpeed resumes pipeline, tensor- and expert-parallel runs from what `ucp convert` wrote, at other degrees.

Right after the load every rank holds the cuts of the source that its place asks for, weights and moments bit for bit,
with the source's hyper-parameters and steps; the losses of the next steps are those of the uninterrupted run, up to the
order in which floats are summed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

import ucp
from tests.integration.deepspeed.deepspeed_cuts import cut
from tests.integration.matrix_page import write_section

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
TRAIN = FIXTURES / "make" / "deepspeed" / "deepspeed_train.py"
EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")
EXPERTS = 4
"""In the model of the fixtures."""


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
    via: str = ""
    """What it was written for before, natively: then this is the way back."""
    rules: str = ""
    """File with a family, where what it was written for before does not record how ranks cut parameters."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What a source of one stage does not tell of the run: how it deals its layers out."""

    @property
    def name(self) -> str:
        run = "-".join(str(value) for value in self.case.values() if isinstance(value, int))
        via = f"-via-{self.via}" if self.via else ""
        via += "-unrecorded" if self.rules else ""
        return f"{self.source}{via}-to-{self.topology or f'universal-{run}'}"

    @property
    def layout(self) -> str:
        """Degrees of the run that loads it."""
        run = {**report(self.source)["case"], **self.case}
        mp = run.get("model_parallel_size", 1)
        tp = mp if run["kind"] == "autotp" else run.get("tensor_parallel_size", 1)
        degrees = {
            "PP": mp // tp,
            "TP": tp,
            "EP": run.get("expert_parallel_size", 2) if run["kind"].startswith("moe") else 1,
            "DP": self.ranks // mp,
        }
        words = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1 or axis == "DP"]
        return f"{' '.join(words)}, ZeRO-{run['stage']}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found right after a load, and after the next steps."""

    tensors: int
    """Compared bit for bit, on all ranks."""
    loss_gap: float | None
    """Largest relative difference of the next losses; None: at this degree it is another model."""


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
    Cell("z0-pp2-alike", "dp=1,pp=2,zero=0", 2),
    Cell("z0-pp2-alike", "dp=2,zero=1", 2, {**grid(2, 1), "stage": 1}),
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
    Cell("z1-ep2-dp4-0.18", "dp=4,ep=2,zero=1", 4),
    Cell("z2-ep2-dp4-roundrobin-0.18", "dp=4,ep=2,zero=2", 4),
    Cell("z0-ep2-dp4", "dp=2,ep=2,zero=1", 2, {"ranks": 2, "stage": 1}),
    Cell("z0-ep2-fp16-one-group", "dp=2,ep=2,zero=0", 2),
    Cell("z0-ep2-fp16-one-group", "dp=2,ep=1,zero=0", 2, {"expert_parallel_size": 1}),
    Cell("z1-ep2-two-layers", "dp=2,ep=1,zero=1", 2, {"expert_parallel_size": 1}),
    Cell("z1-ep2-dp4-bf16", "dp=4,ep=2,zero=1", 4),
    Cell("z1-ep2-dp4", "", 2, {"ranks": 2, "expert_parallel_size": 1}),
    Cell(
        "z1-pp2-tp2-dp2-bf16",
        "dp=1,tp=2,pp=2,zero=1",
        4,
        grid(4, 4, 2),
        via="dp=1,tp=4,pp=1,zero=1",
        settings={"stages": "0,3,6", "tied": "embed:5"},
    ),
    Cell("z1-pp4-tied", "dp=1,pp=4,zero=1", 4, via="dp=3,zero=1", settings={"partition": "uniform", "tied": "embed:5"}),
    Cell("z1-ep2-dp4", "dp=4,ep=2,zero=1", 4, via="dp=2,ep=1,zero=1"),
    Cell("z1-tp2-dp2", "dp=2,tp=2,zero=1", 4, via="dp=2,zero=2", rules="autotp.toml"),
    Cell("z1-tp2-dp2", "", 4, via="dp=2,zero=2", rules="autotp.toml"),
)
MAIN = ("z1-pp2-tp2-dp2-bf16", "z1-pp4-tied", "z1-ep2-dp4")
"""Sources that come first in the table."""

TOLERANCE = {"autotp": 1e-4, "pipeline": 1e-4, "alike": 1e-4, "3d": 2e-2, "moe": 1e-2}
"""Largest relative difference of a loss, by kind of model. The 3D model trains a scale on each rank, which a conversion
averages; it mixes what a tensor-parallel rank has: at another degree it is another model, and no loss is compared.
An expert drops the tokens of a rank that are too many for it, so that losses depend on the number of ranks."""

STAGE_0 = 3e-2
"""The same between a pipeline with and without ZeRO: 0.19.8 counts tied gradients twice in the norm that it clips by
without ZeRO."""


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
    command = [*launcher, str(TRAIN), "--case", cell.source, "--resume", str(checkpoint)]
    command += ["--case-config", json.dumps(config), "--out", str(out), *([] if cell.topology else ["--universal"])]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DEEPSPEED_TIMEOUT": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Outcome | None]]:
    """Name of each cell that was run -> what was found, None where that is not as it should be; the page of all."""
    found: dict[str, Outcome | None] = {}
    yield found
    if len(found) == len(CELLS):
        write_section("deepspeed", _section(found))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_rank_holds_what_its_place_asks_for(cell: Cell, outcomes: dict[str, Outcome | None], tmp_path: Path) -> None:
    outcomes[cell.name] = None
    load(cell, written(cell, tmp_path), tmp_path / "out")
    truths = sorted((tmp_path / "out").glob("truth*.safetensors"))
    assert truths
    seen: list[str] = []
    for rank, truth in enumerate(truths):
        seen += check_rank(cell, truth, rank, of=len(truths))
    trained = {name for name, atom in source(cell.source).atoms.items() if "exp_avg" in atom.states}
    assert set(seen) >= trained
    gap = check_run(cell, json.loads(truths[0].with_suffix(".json").read_text()))
    outcomes[cell.name] = Outcome(len(seen), gap)


def test_what_is_not_recorded_to_be_cut_along_dim_1_is_cut_wrongly_without_a_word(tmp_path: Path) -> None:
    """If this fails, DeepSpeed compares shapes now: a universal checkpoint can be written for tp=2 without a record."""
    from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state
    from deepspeed.utils.tensor_fragment import fragment_address

    path = FIXTURES / "deepspeed" / "z1-pp2-dp2" / "checkpoint"
    with pytest.raises(ucp.errors.TopologyError, match=r"model family .* 2 tensor-parallel ranks"):
        ucp.convert(path, tmp_path / "refused", to="deepspeed-universal", topology="tp=2")
    ucp.convert(path, tmp_path / "written", to="deepspeed-universal", workers=1)
    whole = ucp.open(path).read("1.weight", "weight")
    rows, columns = whole.shape
    row_parallel = torch.nn.Parameter(torch.zeros(rows, columns // 2))
    held = torch.zeros(rows * columns // 2)
    row_parallel._hp_mapping = SimpleNamespace(  # as ZeRO attaches it
        lp_fragment_address=fragment_address(numel=held.numel(), start=0), get_hp_fragment=lambda: held
    )
    folder = next((tmp_path / "written").glob("global_step*/zero/1.weight"))
    load_hp_checkpoint_state(row_parallel, str(folder), 1, 2)
    assert torch.equal(held, whole.chunk(2, dim=0)[1].flatten())
    assert not torch.equal(held, whole.chunk(2, dim=1)[1].flatten())


def written(cell: Cell, folder: Path) -> Path:
    """Convert the source, by way of another layout where that is asked for."""
    path = FIXTURES / "deepspeed" / cell.source / "checkpoint"
    if cell.via:
        between = folder / "between"
        dropped = {"drop": "universal_checkpoint_info"} if cell.rules else {}
        ucp.convert(path, between, to="deepspeed", topology=cell.via, settings=dropped, workers=1, verify=True)
        path = between
    target = "deepspeed" if cell.topology else "deepspeed-universal"
    topology = cell.topology or ("tp=2" if cell.rules else None)
    rules = FIXTURES / "deepspeed" / cell.rules if cell.rules else None
    options = {"topology": topology, "settings": cell.settings, "patterns": rules}
    ucp.convert(path, folder / "written", to=target, workers=1, verify=True, **options)
    return folder / "written"


def check_rank(cell: Cell, truth: Path, rank: int, *, of: int) -> list[str]:
    """Compare what a rank holds; gives the name in the source of each tensor that was compared."""
    tp = int(cell.case.get("tensor_parallel_size", 0)) or report(cell.source)["case"].get("tensor_parallel_size", 1)
    if report(cell.source)["case"]["kind"] == "autotp":
        tp = of
    seen = []
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
            seen.append(name)
    return seen


def check_run(cell: Cell, loaded: dict[str, Any]) -> float | None:
    """Compare what the run says: hyper-parameters, steps and losses; gives the largest relative gap of these."""
    before = report(cell.source)
    assert loaded["step"] == before["step"]
    kind, stage = before["case"]["kind"], cell.case.get("stage", before["case"]["stage"])
    clipped_otherwise = kind == "pipeline" and (stage == 0) != (before["case"]["stage"] == 0)
    tolerance = STAGE_0 if clipped_otherwise else TOLERANCE[kind]
    gap = None
    if kind != "3d" or loaded["case"]["tensor_parallel_size"] == before["case"]["tensor_parallel_size"]:
        pairs = zip(loaded["losses_after"], before["losses_after"], strict=True)
        gap = max(abs(after - wanted) / abs(wanted) for after, wanted in pairs)
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
    return gap


def _section(outcomes: Mapping[str, Outcome | None]) -> str:
    import deepspeed

    lines = ["| source | what is written | loaded at | right after the load | next losses |", "|---|---|---|---|---|"]
    for cell in sorted(CELLS, key=lambda cell: MAIN.index(cell.source) if cell.source in MAIN else len(MAIN)):
        told = "".join(f" with `--set {name}={value}`" for name, value in cell.settings.items())
        told += f" without a record of cuts, by `--patterns {cell.rules}`" if cell.rules else ""
        way = f"back from `{cell.via}`{told}" if cell.via else ""
        what = ", ".join(filter(None, ["native" if cell.topology else "universal", way]))
        lines.append(f"| {cell.source} | {what} | {cell.layout} | {_shown(outcomes[cell.name])} |")
    versions = f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    tensors = sum(own.tensors for own in outcomes.values() if own)
    return _SECTION.format(versions=versions, table="\n".join(lines), loads=len(outcomes), tensors=f"{tensors:,}")


def _shown(outcome: Outcome | None) -> str:
    if outcome is None:
        return "**failed** | "
    if outcome.loss_gap is None:
        return f"exact, {outcome.tensors} | [3]"
    return f"exact, {outcome.tensors} | {f'{outcome.loss_gap:.0e}' if outcome.loss_gap else 'exact'}"


_SECTION = """## DeepSpeed with pipeline, tensor and expert parallelism

Sources: checkpoints that real DeepSpeed wrote (`fixtures/deepspeed/`; names give ZeRO stage and degrees). `ucp`
wrote each natively or as a universal checkpoint, some of them by way of another layout, and real DeepSpeed loaded it:
{versions}, on CPU with gloo.
"exact": every rank holds its shards of the source's weights and moments, bit for bit, with the
source's steps and hyper-parameters ({tensors} tensors over {loads} loads). Next losses: largest relative difference
from the uninterrupted run.

{table}

[3] Each tensor-parallel rank of this model trains its own scale, and a conversion to another degree averages the
scales. That makes it another model, so losses are not compared.

[DeepSpeed files](deepspeed.md#what-is-written-natively) says which degrees are possible and what is refused.
"""
