"""A slice of the real matrices that every change runs: one cell of each framework, in minutes (`make slice`).

Each framework loads what `ucp` wrote for another layout, or is loaded into by `ucp.load_into`, and holds what the run
that saved held. The whole matrices are run by `make integration`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ucp

pytest.importorskip("deepspeed.runtime", reason="needs DeepSpeed; `make slice` installs it")

from tests.integration.deepspeed.resume import resume_matrix
from tests.integration.deepspeed.resume.test_deepspeed_resume import TOLERANCE
from tests.integration.live.test_load_sharded import TWO, check, told
from tests.integration.megatron import megatron_jobs
from tests.integration.megatron.matrix import megatron_matrix
from tests.integration.torch import test_dcp_resume as dcp

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_deepspeed_goes_on_at_zero_3_from_zero_1(tmp_path: Path) -> None:
    cells = [cell for cell in resume_matrix.cells() if cell.name.startswith("z1-dp4-fp32-to-z3-dp2-")]
    assert len(cells) == 2
    (tmp_path / "written").mkdir()
    (tmp_path / "results").mkdir()
    resume_matrix.convert_all(cells, tmp_path / "written")
    resume_matrix.load_all(cells, tmp_path / "written", tmp_path / "results")
    for cell in cells:
        verdict = resume_matrix.judge(cell, tmp_path / "results")
        assert not verdict.error
        assert verdict.compared >= 40
        assert not verdict.differing
        assert verdict.loss_gap <= TOLERANCE["fp32"]


def test_megatron_loads_at_tp_1_what_it_saved_at_tp_2(tmp_path: Path) -> None:
    source = megatron_matrix.Source("llama", "TP2 DP2", "tp2 dp2")
    target = megatron_matrix.Target("TP1", "tp1")
    cell = megatron_matrix.Cell(source, target, megatron_matrix.ROUTES[0])
    made, written = tmp_path / "made", tmp_path / "written"
    cases = (source.case("dp"), source.case("dp", target.job))
    megatron_jobs.make_sources(cases, made, release=megatron_matrix.MAKER)
    assert megatron_matrix.convert_all([cell], made, written) == {}
    loaded = megatron_jobs.load_all([cell.load(written, made)], tmp_path / "results")[cell.name]
    assert not loaded.error
    assert loaded.tensors >= 100
    assert loaded.differences == ()


def test_fsdp2_goes_on_with_two_ranks_from_four(tmp_path: Path) -> None:
    written = tmp_path / "written"
    ucp.convert(dcp.FIXTURES / "torch/fsdp2-dp4/checkpoint", written, to="dcp", topology="dp=2")
    report, tensors = dcp.resumed("fsdp2-dp2-full", written, tmp_path / "out")
    expected, truth = dcp.truth_of("torch", "fsdp2-dp4")
    dcp.check(tensors, truth)
    assert report["losses_after"] == pytest.approx(expected["losses_after"], rel=1e-5)


def test_load_into_gives_two_ranks_what_four_saved(tmp_path: Path) -> None:
    for job, ranks in zip(TWO[:1], told(TWO[:1], 2, tmp_path), strict=True):
        check(job, ranks)
