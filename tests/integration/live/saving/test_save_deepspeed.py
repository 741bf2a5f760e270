"""`ucp.save` from runs of real DeepSpeed: what it saves is what DeepSpeed saves, and DeepSpeed resumes from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

import ucp
from tests.integration.deepspeed.test_live_kinds import _launch, _read

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

TRAINED = ("z1-ep2", "z1-ep2-dp4-bf16", "z1-dp2-fp16", "z1-dp4-bf16", "z0-fp32", "z3-dp4-bf16")
"""Cases that two ranks train and save; experts have a process of their own, as their groups of ranks outlive them."""


@dataclass(frozen=True, slots=True)
class Resume:
    """How a run goes on from a store."""

    source: str
    """The run that saved it."""
    topology: str = ""
    """Of the checkpoint of DeepSpeed that the store is converted to, which DeepSpeed loads; empty to load it live."""
    case: dict[str, Any] = field(default_factory=dict)
    """What differs from the case of the run."""

    @property
    def name(self) -> str:
        return f"{self.source}-to-{self.topology or 'live'}-{self.case.get('stage', '')}"


RESUMES = (
    Resume("z1-ep2", "dp=2,ep=2,zero=1"),
    Resume("z1-ep2", "", {"stage": 2, "expert_parallel_size": 1}),
    Resume("z1-ep2-dp4-bf16", "dp=2,ep=2,zero=1"),
    Resume("z1-dp2-fp16", "dp=2,zero=2", {"stage": 2}),
    Resume("z1-dp2-fp16", "", {"stage": 3}),
    Resume("z1-dp4-bf16", "dp=2,zero=1"),
    Resume("z0-fp32", "dp=2,zero=3", {"stage": 3}),
    Resume("z3-dp4-bf16", "", {"stage": 1}),
)


def _launch_all(jobs: list[dict[str, Any]], root: Path) -> None:
    for has_experts in (True, False):
        chosen = [job for job in jobs if ("-ep" in job["base"]) is has_experts]
        ordered = sorted(chosen, key=lambda job: job["case"].get("stage", int(job["base"][1])))
        _launch(2, ordered, root / f"jobs-{has_experts}.json")


def _tell(base: str, passed: str, out: Path, *, checkpoint: Path | None = None, **case: object) -> dict[str, Any]:
    told = {"base": base, "case": {"ranks": 2, **case}, "checkpoint": str(checkpoint), "passed": passed}
    return {**told, "topology": "", "patterns": "", "out": str(out)}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    _launch_all([_tell(base, "trained", root / base) for base in TRAINED], root)
    return root


@pytest.fixture(scope="session")
def resumed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, jobs = tmp_path_factory.mktemp("resumed"), []
    for resume in RESUMES:
        checkpoint, out = trained / resume.source / "store", root / resume.name
        out.mkdir()
        if resume.topology:
            ucp.convert(checkpoint, out / "converted", to="deepspeed", topology=resume.topology)
            checkpoint = out / "converted"
        passed = "resumed" if resume.topology else "engine"
        jobs.append(_tell(resume.source, passed, out, checkpoint=checkpoint, **resume.case))
    _launch_all(jobs, root)
    return root


@pytest.mark.parametrize("source", TRAINED)
def test_ucp_saves_what_deepspeed_saves(source: str, trained: Path) -> None:
    assert "error" not in _read(trained / source)
    saved, store = trained / source / "saved", trained / source / "store"
    difference = ucp.diff(saved, store)
    assert difference.equal, difference
    assert ucp.verify(store).ok
    indexes = [ucp.inspect(path) for path in (saved, store)]
    assert indexes[0].topology == indexes[1].topology
    assert indexes[0].groups == indexes[1].groups
    extras = [ucp.open(path).extras for path in (saved, store)]
    for name in ("lr_scheduler", "num_experts", "ds_config", *(("loss_scaler",) if "fp16" in source else ())):
        assert str(extras[0].get(name)) == str(extras[1].get(name)), name
    assert {key: extras[0]["engine"][key] for key in extras[1]["engine"]} == extras[1]["engine"]


def test_a_link_of_some_experts_of_deepspeed(trained: Path) -> None:
    """Two of four experts are of the newest iteration, one of each rank."""
    folder = trained / "z1-ep2"
    chain, before, after = (ucp.open(folder / name) for name in ("", "saved", "saved-later"))
    newest = [name for name, atom in chain.items() if atom.index.iteration is None]
    numbers = sorted({int(name.split(".")[-2]) for name in newest if "experts" in name})
    assert len(numbers) == 2
    assert [number // 2 for number in numbers] == [0, 1]
    assert chain.step == 8
    for name, atom in chain.items():
        for state in atom.states:
            truth = after if name in newest else before
            assert chain.read(name, state).equal(truth.read(name, state)), (name, state)


@pytest.mark.parametrize("resume", RESUMES, ids=lambda resume: resume.name)
def test_a_run_goes_on_from_it(resume: Resume, trained: Path, resumed: Path) -> None:
    before, after = _read(trained / resume.source), _read(resumed / resume.name)
    assert "error" not in after, after
    assert after["steps"] == 3
    difference = ucp.diff(trained / resume.source / "saved", resumed / resume.name / "saved")
    assert difference.equal, difference
    rounded = "bf16" in resume.source or "fp16" in resume.source
    assert after["losses"] == pytest.approx(before["losses"], rel=5e-3 if rounded else 1e-5)
