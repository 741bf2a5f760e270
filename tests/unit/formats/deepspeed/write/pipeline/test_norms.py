"""Which optimizers of DeepSpeed sum the norm of the gradients group by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from ucp_formats.deepspeed.config import Precision, RunConfig
from ucp_formats.deepspeed.write.pipeline.norms import hang_notes, norm_notes, sums_by_group
from ucp_formats.deepspeed.write.rank_files import groups_of
from ucp_formats.deepspeed.write.run import RunFacts, run_facts

import ucp
from ucp.core.target import TargetOptions

FIXTURES = Path(__file__).resolve().parents[6] / "fixtures" / "deepspeed"
FUSED = {"optimizer": {"type": "AdamW"}}
TORCH = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
GRAD_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
NO_NORM = {"zero_optimization": {"stage": 1, "compute_grad_norm": False}}
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@cache
def base() -> RunFacts:
    return run_facts(ucp.inspect(FIXTURES / "z1-pp2-dp2" / "checkpoint"), TargetOptions(), ranks=1, stage=1, tp=1)


def facts(stage: int, precision: Precision, config: Mapping[str, object]) -> RunFacts:
    return replace(base(), stage=stage, precision=precision, config=RunConfig(dict(config)))


@pytest.mark.parametrize(
    ("stage", "precision", "config", "expected"),
    [
        (1, Precision.FP32, {}, True),
        (1, Precision.FP16, {}, True),
        (1, Precision.BF16, {}, True),
        (1, Precision.BF16, GRAD_FP32, False),  # BF16_Optimizer
        (1, Precision.BF16, {**GRAD_FP32, **OFFLOADED}, True),
        (1, Precision.FP32, GRAD_FP32, True),
        (1, Precision.FP32, NO_NORM, False),
        (0, Precision.FP32, TORCH, False),
        (0, Precision.FP16, TORCH, True),
        (0, Precision.FP16, FUSED, False),
        (0, Precision.FP16, {"optimizer": {**FUSED["optimizer"], "legacy_fusion": True}}, True),
    ],
)
def test_norms_that_are_taken_group_by_group(
    stage: int, precision: Precision, config: Mapping[str, object], expected: bool
) -> None:
    own = facts(stage, precision, config)
    assert sums_by_group(own, groups_of(own)) is expected


def test_stages_of_unlike_numbers_of_groups_hang() -> None:
    groups = groups_of(base())
    one, other = [group.params[0].name for group in groups]

    def notes(*places: Mapping[str, object]) -> list[str]:
        return list(hang_notes(base(), groups, places, "stages have"))

    assert not notes({one: 0}, {other: 0})
    assert not notes({one: 0, other: 1}, {other: 0, one: 1})
    assert "stages have parameters of 1 or 2 optimizer groups" in notes({one: 0, other: 1}, {other: 0})[0]
    assert "of 0 or 2 optimizer groups" in notes({one: 0, other: 1}, {})[0]


def test_a_stage_of_copies_alone_fails_under_bf16_optimizer() -> None:
    groups = groups_of(base())
    one, other = [group.params[0].name for group in groups]
    places: list[Mapping[str, object]] = [{one: 0}, {one: 0}, {other: 0, one: 0}, {}]
    (note,) = norm_notes(facts(1, Precision.BF16, GRAD_FP32), groups, places)
    assert "stage 1 trains copies of tied layers alone" in note
    assert not list(norm_notes(facts(0, Precision.FP32, GRAD_FP32), groups, places))
