"""What real DeepSpeed does with files that lack optimizer states is what docs/reference/deepspeed.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

import ucp

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parents[2] / "fixtures" / "deepspeed"

SOURCES = {"fp32": "z1-dp4-fp32", "bf16": "z2-dp4-bf16", "fused": "z0-fp16"}
WITHOUT = {
    "all": ("*/exp_avg*", "*/step"),
    "moments": ("*/exp_avg*",),
    "second": ("*/exp_avg_sq",),
    "step": ("*/step",),
}
"""States to leave out."""

MODULE_ONLY = {"load_module_only": True}
NO_OPTIMIZER = {"load_optimizer_states": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One conversion and load."""

    source: str
    without: str
    stage: int
    universal: bool = False
    options: Mapping[str, bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the test."""
        kind = "universal" if self.universal else "native"
        return "-".join([self.source, "without", self.without, kind, f"z{self.stage}", *self.options])

    @property
    def destination(self) -> str:
        """Folder of what is loaded."""
        return f"{self.source}-{self.without}-{'universal' if self.universal else f'z{self.stage}'}"

    def convert(self, root: Path) -> ucp.ConvertReport:
        """Write the destination."""
        to = "deepspeed-universal" if self.universal else "deepspeed"
        topology = None if self.universal else ucp.Topology(dp=1, zero=self.stage)
        source = FIXTURES / SOURCES[self.source] / "checkpoint"
        dst = root / self.destination
        return ucp.convert(source, dst, to=to, topology=topology, exclude=WITHOUT[self.without], workers=1)

    def job(self, root: Path) -> dict[str, object]:
        """For the worker."""
        case: dict[str, object] = {"stage": self.stage, "ranks": 1, **({} if self.stage else {"config": {}})}
        return {
            "base": SOURCES[self.source],
            "case": case,
            "checkpoint": str(root / self.destination),
            "universal": self.universal,
            "options": dict(self.options),
            "truth": str(FIXTURES / SOURCES[self.source] / "truth.safetensors"),
        }


ANEW = [Load(source=dtype, without="all", stage=stage) for dtype in ("fp32", "bf16") for stage in range(4)]
ANEW += [Load(source="fused", without="all", stage=0)]
ANEW += [Load(source=dtype, without="all", stage=stage, universal=True) for dtype in SOURCES for stage in (1, 2)]
"""The optimizer starts anew."""

FAILING = [
    Load(source=dtype, without=without, stage=stage)
    for dtype in ("fp32", "bf16")
    for without in ("moments", "second", "step")
    for stage in range(4)
]
FAILING += [Load(source="fp32", without=name, stage=1, universal=True) for name in ("moments", "second", "step")]
FAILING += [Load(source="fp32", without=name, stage=3, universal=True) for name in WITHOUT]
"""The load fails, or the first step after it."""

WEIGHTS = [
    Load(source=dtype, without="second", stage=stage, options=NO_OPTIMIZER if stage else MODULE_ONLY)
    for dtype in ("fp32", "bf16")
    for stage in range(4)
]
WEIGHTS += [Load(source="fp32", without=name, stage=3, universal=True, options=MODULE_ONLY) for name in WITHOUT]
"""The options that the page names load the weights."""

NOTHING = [Load(source="fp32", without="second", stage=3, options=MODULE_ONLY)]
"""An option that loads nothing, without a word."""

LOADS = (*ANEW, *FAILING, *WEIGHTS, *NOTHING)


def _id(load: Load) -> str:
    return load.name


@pytest.fixture(scope="session")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[str]]:
    """Convert everything: the notes of each destination, whose folder is under the key "root"."""
    root = tmp_path_factory.mktemp("partial")
    found: dict[str, Sequence[str]] = {"root": [str(root)]}
    for load in LOADS:
        if load.destination not in found:
            found[load.destination] = load.convert(root).notes
    return found


@pytest.fixture(scope="session")
def reports(notes: Mapping[str, Sequence[str]]) -> Mapping[str, dict[str, Any]]:
    """Load everything in one process."""
    root = Path(notes["root"][0])
    jobs, out = root / "jobs.json", root / "out.json"
    jobs.write_text(json.dumps([load.job(root) for load in LOADS]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*launcher, str(HERE / "partial_worker.py"), str(jobs), str(out)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-4000:]}")
    return {load.name: report for load, report in zip(LOADS, json.loads(out.read_text()), strict=True)}


@pytest.mark.parametrize("load", ANEW, ids=_id)
def test_without_any_state_the_optimizer_starts_anew(
    load: Load, notes: Mapping[str, Sequence[str]], reports: Mapping[str, dict[str, Any]]
) -> None:
    assert any("initializes them" in note for note in notes[load.destination])
    report = reports[load.name]
    expected = {"load": "", "step": "", "wrong": [], "masters": "", "states": [], "decays": [0.1, 0.0], "named": False}
    assert report == expected


@pytest.mark.parametrize("load", FAILING, ids=_id)
def test_without_some_states_it_fails(load: Load, reports: Mapping[str, dict[str, Any]]) -> None:
    report = reports[load.name]
    if load.universal:
        assert bool(report["load"]) is (load.stage == 3)
    assert "Error" in report["load"] or "KeyError" in report["step"]


@pytest.mark.parametrize("load", WEIGHTS, ids=_id)
def test_the_weights_alone_load(load: Load, reports: Mapping[str, dict[str, Any]]) -> None:
    report = reports[load.name]
    assert not report["load"]
    assert not report["step"]
    assert not report["wrong"]
    assert bool(report["masters"]) is (load.source == "bf16"), "masters are made of the rounded weights"


@pytest.mark.parametrize("load", NOTHING, ids=_id)
def test_limit_stage_3_loads_no_weights_with_module_only(load: Load, reports: Mapping[str, dict[str, Any]]) -> None:
    """If this fails, DeepSpeed loads them now: drop it from the page."""
    assert not reports[load.name]["load"]
    assert reports[load.name]["wrong"]
