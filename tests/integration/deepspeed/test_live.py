"""`ucp.load_into` fills engines of real DeepSpeed in place: every stage, from every stage, at other numbers of ranks.

Right after the load, weights, moments, steps, hyper-parameters, loss scale and frozen tensors are those of the source,
bit for bit: as DeepSpeed gathers them, and in the checkpoint that it then saves. The losses of the next steps are those
of the uninterrupted run, as exactly as when DeepSpeed itself resumes (`test_deepspeed_resume.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make integration` installs it")

import ucp
from tests.integration.deepspeed.resume.resume_matrix import Cell, Verdict, judge, load_all
from tests.integration.deepspeed.resume.resume_sources import OTHERS, SOURCES, Target
from tests.integration.deepspeed.resume.test_deepspeed_resume import FP16_STAGE_0, TOLERANCE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

MORE = {"z1-dp4-fp32": (Target(3, 3), Target(2, 3)), "z3-dp4-fp32": (Target(3, 1), Target(2, 3), Target(0, 1))}
"""Targets beside those of the resume matrix."""


def _cells() -> list[Cell]:
    return [
        Cell(source=source, target=target, universal=False, live=True)
        for source in (*SOURCES, *OTHERS)
        for target in (*source.targets, *MORE.get(source.name, ()))
    ]


CELLS = _cells()
STRICT = [cell for cell in CELLS if not cell.unmanaged]


def _id(cell: Cell) -> str:
    return cell.name


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Load everything; a folder per cell."""
    results = tmp_path_factory.mktemp("live")
    load_all(CELLS, results, results)
    return results


@pytest.fixture(scope="session")
def verdicts(results: Path) -> Mapping[str, Verdict]:
    return {cell.name: judge(cell, results) for cell in CELLS}


@pytest.mark.parametrize("cell", CELLS, ids=_id)
def test_weights_and_moments_are_the_source_s_bit_for_bit(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    verdict = verdicts[cell.name]
    assert not verdict.error
    assert verdict.compared >= 40
    assert not verdict.differing


@pytest.mark.parametrize("cell", STRICT, ids=_id)
def test_frozen_parameters_and_buffers_too(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    assert not verdicts[cell.name].not_restored


@pytest.mark.parametrize("cell", CELLS, ids=_id)
def test_steps_hyperparameters_and_client_state_are_the_source_s(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    assert verdicts[cell.name].settings == ()


@pytest.mark.parametrize("cell", CELLS, ids=_id)
def test_training_goes_on_as_if_it_had_not_stopped(cell: Cell, verdicts: Mapping[str, Verdict]) -> None:
    verdict = verdicts[cell.name]
    crosses = cell.source.dtype == "fp16" and (cell.source.truth["case"]["stage"] == 0) != (cell.target.stage == 0)
    assert verdict.loss_gap <= (FP16_STAGE_0 if crosses else TOLERANCE[cell.source.dtype])
    assert verdict.lrs_equal
    assert verdict.step_after == verdict.step_expected


@pytest.mark.parametrize("cell", STRICT, ids=_id)
def test_what_deepspeed_then_saves_is_the_source(cell: Cell, results: Path) -> None:
    difference = ucp.diff(cell.source.folder / "checkpoint", results / cell.name / "saved")
    assert difference.equal, difference
