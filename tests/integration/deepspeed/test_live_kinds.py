"""`ucp.load_into` fills engines of real DeepSpeed that are not plain: experts, pipelines; and from other formats.

What an engine saves right after the load is compared with the source, state by state, bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

import ucp
from tests.integration.deepspeed.resume.resume_sources import FIXTURES
from tests.integration.deepspeed.test_deepspeed_parallel import autotp, grid

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

RULES = str(FIXTURES / "autotp.toml")
WORKER = Path(__file__).resolve().parent / "live_worker.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A load."""

    source: str
    """Fixture that is loaded."""
    ranks: int
    """Of the engine."""
    case: Mapping[str, object] = field(default_factory=dict)
    """What differs from the case of the source."""
    passed: str = "engine"
    """What is passed: see the worker."""
    to: str = ""
    """Format that the source is converted to before it is loaded; as it is, by default."""
    topology: str = ""
    """Of the run, where it is passed."""
    rules: str = ""
    """File with a family, where nothing records how ranks cut parameters."""

    @property
    def name(self) -> str:
        stage = self.case.get("stage", "")
        topology = f"-{self.topology}" if self.topology else ""
        return f"{self.source}-{self.to}-to-z{stage}-of-{self.ranks}{topology}-{self.passed}"

    @property
    def truth(self) -> dict[str, Any]:
        """What was recorded of the uninterrupted run."""
        found: dict[str, Any] = json.loads(min((FIXTURES / self.source).glob("truth*.json")).read_text())
        return found


WHOLE = (
    Job(source="z1-ep2", ranks=2),
    Job(source="z1-ep2-dp4", ranks=2),
    Job(source="z1-ep2", ranks=4, case={"stage": 2}),
    Job(source="z1-ep2", ranks=4, case={"expert_parallel_size": 4}),
    Job(source="z0-ep2-dp4", ranks=2, case={"stage": 1}),
    Job(source="z1-ep2-two-layers", ranks=2, case={"stage": 0}),
    Job(source="z1-ep2-dp4-bf16", ranks=2),
    Job(source="z1-pp2-dp2", ranks=4),
    Job(source="z1-pp2-dp2", ranks=2),
    Job(source="z1-pp2-dp2", ranks=1, case={"model_parallel_size": 1}),
    Job(source="z0-pp2-bf16", ranks=2),
    Job(source="z3-dp4-bf16", ranks=2, case={"stage": 2}, to="ucp"),
    Job(source="z1-dp4-fp32", ranks=2, case={"stage": 3}, to="deepspeed-universal"),
    Job(source="z1-dp4-fp32", ranks=1, case={"stage": 2}, passed="optimizer"),
)
"""Loads of everything."""

SHARED = (
    Job(source="z1-tp2-dp2", ranks=2, topology="tp=2"),
    Job(source="z1-tp2-dp2", ranks=4, topology="tp=2,dp=2", case={"stage": 3}),
    Job(source="z1-tp2-dp2", ranks=4, topology="tp=4", case={"stage": 2, **grid(4, 4), **autotp(4)}),
    Job(source="z3-tp2-dp2", ranks=4, topology="tp=2,dp=2", case={"stage": 1}, rules=RULES),
    Job(source="z0-tp2-dp2", ranks=4, topology="tp=2,dp=2", case={"stage": 2}, rules=RULES),
    Job(source="z2-tp2-dp2", ranks=2, topology="tp=2", to="ucp", rules=RULES),
    Job(source="z1-pp2-tp2-dp2-bf16", ranks=4, topology="tp=2,pp=2", case=grid(4, 4, 2)),
    Job(source="z1-pp2-tp2-dp2-bf16", ranks=4, topology="tp=2,dp=2", case=grid(4, 2, 2)),
    Job(source="z1-pp2-tp2-dp2-bf16", ranks=4, topology="tp=4", case=grid(4, 4, 4)),
)
"""Loads of everything into engines whose ranks share layers."""

WEIGHTS = (
    Job(source="z3-dp4-bf16", ranks=2, case={"stage": 2}, passed="weights"),
    Job(source="z3-dp4-bf16", ranks=2, case={"stage": 3}, passed="weights"),
)
"""Loads of weights alone."""

REFUSED = (
    (Job(source="z1-dp4-fp32", ranks=1, case={"stage": 1}, passed="module"), "Pass the engine as the model"),
    (Job(source="z1-dp4-fp32", ranks=1, case={"stage": 3}, passed="apart"), "Pass the engine as the model"),
    (Job(source="z1-tp2-dp2", ranks=2), "expected a topology with the engine's tp=2"),
    (Job(source="z1-tp2-dp2", ranks=2, topology="dp=2"), "got one with tp=1"),
)
"""Loads that are refused, with what is said."""


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Carry out all jobs; a folder per job."""
    root = tmp_path_factory.mktemp("live")
    jobs = sorted((*WHOLE, *SHARED, *WEIGHTS, *(job for job, _ in REFUSED)), key=_order)
    for (ranks, kind), group in groupby(jobs, key=lambda job: _order(job)[:2]):
        _launch(ranks, [_told(job, root) for job in group], root / f"jobs-{ranks}-{kind}.json")
    return root


def _order(job: Job) -> tuple[int, str, int]:
    """Groups of ranks outlive an engine, so each kind and degree of parallelism has a process of its own.

    Stage 3 comes last in it, as it replaces `torch.nn.functional.linear` for good.
    """
    kind = next((kind for kind in ("ep", "pp", "tp") if f"-{kind}" in job.source), "dp")
    return job.ranks, kind + "".join(job.topology.split(",")[:1]), int(str(job.case.get("stage", job.source[1])))


def _told(job: Job, root: Path) -> dict[str, object]:
    checkpoint = FIXTURES / job.source / "checkpoint"
    if job.to:
        (root / job.name).mkdir()
        ucp.convert(checkpoint, root / job.name / "converted", to=job.to, patterns=job.rules or None)
        checkpoint = root / job.name / "converted"
    return {
        "base": job.source,
        "case": {"ranks": job.ranks, **job.case},
        "checkpoint": str(checkpoint),
        "passed": job.passed,
        "topology": job.topology,
        "patterns": job.rules,
        "out": str(root / job.name),
    }


def _launch(ranks: int, told: list[dict[str, object]], path: Path) -> None:
    path.write_text(json.dumps(told))
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DEEPSPEED_TIMEOUT": "5"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, str(WORKER), str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def _report(job: Job, results: Path) -> dict[str, Any]:
    return _read(results / job.name)


def _name(job: Job) -> str:
    return job.name


@pytest.mark.parametrize("job", WHOLE, ids=_name)
def test_what_deepspeed_then_saves_is_the_source(job: Job, results: Path) -> None:
    report = _report(job, results)
    assert "error" not in report, report["error"]
    difference = ucp.diff(FIXTURES / job.source / "checkpoint", results / job.name / "saved")
    assert difference.equal, difference
    rerouted = "-ep" in job.source and job.ranks != job.truth["case"]["ranks"]  # each rank has room for so many tokens
    bound = 5e-3 if "bf16" in job.source or rerouted else 1e-5
    assert report["losses"] == pytest.approx(job.truth["losses_after"], rel=bound)


@pytest.mark.parametrize("job", [job for job in WHOLE if job.passed == "engine"], ids=_name)
def test_what_ucp_then_saves_is_what_deepspeed_saves(job: Job, results: Path) -> None:
    saved, store = results / job.name / "saved", results / job.name / "store"
    difference = ucp.diff(saved, store)
    assert difference.equal, difference
    topologies = [replace(ucp.inspect(path).topology, zero=None) for path in (store, saved)]
    assert topologies[0] == topologies[1]  # but for the stage, which files of BF16_Optimizer do not tell
    assert ucp.verify(store).ok


@pytest.mark.parametrize("job", SHARED, ids=_name)
def test_ranks_that_share_layers_get_their_cuts(job: Job, results: Path) -> None:
    report = _report(job, results)
    assert "error" not in report, report["error"]
    told = {"patterns": job.rules or None}
    source, saved = (
        ucp.open(path, **told) for path in (FIXTURES / job.source / "checkpoint", results / job.name / "saved")
    )
    assert saved.atoms.keys() == source.atoms.keys()
    for name, atom in source.atoms.items():
        for state in atom.states:
            assert source.read(name, state).equal(saved.read(name, state)), (name, state)
    if not job.rules:  # as otherwise nothing tells a save how ranks cut parameters
        difference = ucp.diff(FIXTURES / job.source / "checkpoint", results / job.name / "store")
        assert difference.equal, difference
    degree = job.truth["case"].get("tensor_parallel_size", 1)
    if job.case.get("tensor_parallel_size", degree) != degree:
        return  # each rank trains some parameters for itself: another number of ranks is another model
    assert report["losses"] == pytest.approx(job.truth["losses_after"], rel=5e-3 if "bf16" in job.source else 1e-5)


@pytest.mark.parametrize("job", WEIGHTS, ids=_name)
def test_weights_alone_leave_moments_and_steps(job: Job, results: Path) -> None:
    report = _report(job, results)
    assert "error" not in report, report["error"]
    assert report["steps"] == 0
    source, saved = (ucp.open(path) for path in (FIXTURES / job.source / "checkpoint", results / job.name / "saved"))
    for name, atom in saved.atoms.items():
        assert source.read(name, "weight").equal(saved.read(name, "weight"))
        assert not any(saved.read(name, state).any() for state in atom.states if state != "weight")


@pytest.mark.parametrize(("job", "said"), REFUSED, ids=lambda value: value.name if isinstance(value, Job) else "")
def test_refused_with_what_to_do(job: Job, said: str, results: Path) -> None:
    assert said in _report(job, results)["error"]
