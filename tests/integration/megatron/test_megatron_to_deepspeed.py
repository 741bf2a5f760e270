"""What is made of Megatron's files loads in real DeepSpeed bit for bit, and the optimizer goes on from it.

The step is compared with Adam's by hand (`foreign_worker.py`): it is right only with the moments, the rates and the
count of steps of the source.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

import ucp
from ucp.core.index import ParamGroup
from ucp.source.read import index_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parents[2] / "fixtures" / "megatron"
SOURCE = FIXTURES / "llama-tp2-pp2-dp2-full" / "checkpoint"
TRUTH = FIXTURES / "truth" / "llama.safetensors"
_KEPT = Path.home() / ".cache" / "torch_extensions" / f"deepspeed-{version('deepspeed')}"
BUILDS = Path(os.environ.get("TORCH_EXTENSIONS_DIR", _KEPT))
"""Where the tests keep DeepSpeed's operators, as `fixtures/make/deepspeed/deepspeed_run.py` does."""
OPERATORS = {"torch": "", "cpu": "cpu_adam", "fused": "fused_adam"}
"""Optimizer to the operator that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load and step."""

    optimizer: str
    stage: int
    destination: str = ""
    """Folder of a universal checkpoint; empty for native files of the stage."""

    @property
    def name(self) -> str:
        """Of the test."""
        return f"{self.optimizer}-{self.destination or 'native'}-z{self.stage}"

    @property
    def folder(self) -> str:
        """Of what is loaded."""
        return self.destination or f"z{self.stage}"


UNIVERSAL: Mapping[str, Mapping[str, str]] = {"universal": {}, "for-deepspeed": {"optimizer": "deepspeed"}}
FITTING = {"torch": ("", "universal"), **dict.fromkeys(("cpu", "fused"), ("", "universal", "for-deepspeed"))}
LOADS = [Load(optimizer=o, stage=s, destination=d) for o, fit in FITTING.items() for d in fit for s in (1, 2, 3)]
FAILING = [Load(optimizer="torch", stage=1, destination="for-deepspeed")]
"""Forms of the step that the notes say are not for that optimizer."""


def _built(optimizer: str) -> bool:
    operator = OPERATORS[optimizer]
    return not operator or (BUILDS / operator / f"{operator}.so").exists()


def _convert(root: Path) -> None:
    for stage in (1, 2, 3):
        ucp.convert(SOURCE, root / f"z{stage}", to="deepspeed", topology=f"dp=2,zero={stage}", workers=1, verify=True)
    for name, settings in UNIVERSAL.items():
        ucp.convert(SOURCE, root / name, to="deepspeed-universal", settings=settings, workers=1, verify=True)


def _job(load: Load, root: Path, groups: list[ParamGroup]) -> dict[str, object]:
    hyper = groups[0].hyper
    return {
        "checkpoint": str(root / load.folder),
        "truth": str(TRUTH),
        "universal": bool(load.destination),
        "stage": load.stage,
        "optimizer": load.optimizer,
        "groups": [{"names": list(own.params), "weight_decay": own.hyper["weight_decay"]} for own in groups],
        "step": 10,
        **{key: hyper[key] for key in ("betas", "eps", "lr")},
        # one step tensor for all sub-groups, as the note tells
        "mended": load.stage == 3 and load.destination == "universal",
    }


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    """Convert, and load everything in one group of two processes."""
    root = tmp_path_factory.mktemp("foreign")
    _convert(root)
    groups = list(index_of(SOURCE).groups)
    loads = [load for load in (*LOADS, *FAILING) if _built(load.optimizer)]
    jobs, out = root / "jobs.json", root / "out.json"
    jobs.write_text(json.dumps([_job(load, root, groups) for load in loads]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(HERE / "foreign_worker.py"), str(jobs), str(out)]
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(BUILDS), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-4000:]}")
    return {load.name: report for load, report in zip(loads, json.loads(out.read_text()), strict=True)}


def _report(load: Load, reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if not _built(load.optimizer):
        pytest.skip(f"DeepSpeed's operator {OPERATORS[load.optimizer]} is not built in {BUILDS}")
    return reports[load.name]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_it_loads_bit_for_bit_and_takes_the_next_step(load: Load, reports: Mapping[str, dict[str, Any]]) -> None:
    report = _report(load, reports)
    assert report["error"] == ""
    assert (report["wrong"], report["compared"]) == ([], 81)
    assert report["steps"] == [10.0, 10.0]
    assert report["after"] == [], "weights and moments after Adam's step 11"
    assert report["steps_after"] == [11.0, 11.0]


@pytest.mark.parametrize("load", FAILING, ids=lambda load: load.name)
def test_limit_a_step_in_the_form_of_others_fails_as_told(load: Load, reports: Mapping[str, dict[str, Any]]) -> None:
    """If this fails, the optimizer takes that form now: mend the notes and the table in `step_forms`."""
    report = _report(load, reports)
    assert (report["wrong"], report["compared"]) == ([], 81)
    assert "state_steps" in report["error"]
