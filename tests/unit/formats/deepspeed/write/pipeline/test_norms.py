"""Which optimizers of DeepSpeed sum the norm of the gradients group by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from ucp_formats.deepspeed.config import Precision, RunConfig
from ucp_formats.deepspeed.write.pipeline.norms import Norms, norm_by_group
from ucp_formats.deepspeed.write.rank_files import groups_of
from ucp_formats.deepspeed.write.run import RunFacts, run_facts

import ucp
from ucp.core.index import Extra
from ucp.core.target import TargetOptions
from ucp.errors import TopologyError

FIXTURES = Path(__file__).resolve().parents[6] / "fixtures" / "deepspeed"
FUSED = {"optimizer": {"type": "AdamW"}}
TORCH = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
GRAD_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
NO_NORM = {"zero_optimization": {"stage": 1, "compute_grad_norm": False}}
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@cache
def base() -> RunFacts:
    return run_facts(ucp.inspect(FIXTURES / "z1-pp2-dp2" / "checkpoint"), TargetOptions(), ranks=1, stage=1)


def facts(stage: int, precision: Precision, config: Mapping[str, object]) -> RunFacts:
    return replace(base(), stage=stage, precision=precision, config=RunConfig(dict(config)))


@pytest.mark.parametrize(
    ("stage", "precision", "config", "where"),
    [
        (1, Precision.FP32, {}, "stage_1_and_2.py"),
        (1, Precision.FP16, {}, "stage_1_and_2.py"),
        (1, Precision.BF16, {}, "stage_1_and_2.py"),
        (1, Precision.BF16, GRAD_FP32, None),  # BF16_Optimizer
        (1, Precision.BF16, {**GRAD_FP32, **OFFLOADED}, "stage_1_and_2.py"),
        (1, Precision.FP32, GRAD_FP32, "stage_1_and_2.py"),
        (1, Precision.FP32, NO_NORM, None),
        (0, Precision.FP32, TORCH, None),
        (0, Precision.FP16, TORCH, "unfused_optimizer.py"),
        (0, Precision.FP16, FUSED, None),
        (0, Precision.FP16, {"optimizer": {**FUSED["optimizer"], "legacy_fusion": True}}, "fused_optimizer.py"),
    ],
)
def test_norms_that_are_taken_group_by_group(
    stage: int, precision: Precision, config: Mapping[str, object], where: str | None
) -> None:
    own = facts(stage, precision, config)
    found = norm_by_group(own, groups_of(own))
    assert (found is None) if where is None else (found is not None and where in found)


def test_as_many_groups_of_other_kinds_do_no_harm() -> None:
    norms = Norms(base())
    one, other = [next(name for name in (atom.name for atom in group.params)) for group in norms.groups]
    assert norms.fit([{one: 0}, {other: 0}])
    assert norms.fit([{one: 0, other: 1}, {other: 0, one: 1}])
    assert not norms.fit([{one: 0, other: 1}, {other: 0}])
    assert not norms.fit([{one: 0, other: 1}, {}])


@pytest.mark.parametrize(
    ("stage", "precision", "config", "ways"),
    [
        (1, Precision.FP32, {}, "or, for a run that takes no step"),  # clips, so that it has to take the norm
        (1, Precision.BF16, {}, "grad_accum_dtype=fp32 (BF16_Optimizer, whose norm is one sum), or takes no step"),
        (0, Precision.FP16, TORCH, "or, for a run that takes no step"),
    ],
)
def test_what_another_run_could_do_is_told(
    stage: int, precision: Precision, config: Mapping[str, object], ways: str
) -> None:
    norms = Norms(facts(stage, precision, config))
    one, other = [group.params[0].name for group in norms.groups]
    uneven = [{one: 0, other: 1}, {other: 0}]
    with pytest.raises(TopologyError) as error:
        list(norms.notes(uneven, lambda: ["--topology with pp=1"], anyway=False))
    assert ways in str(error.value)
    assert ("zero=0" in str(error.value)) == (stage == 1 and precision is Precision.FP32)
    assert len(list(norms.notes(uneven, list, anyway=True))) == 1


def test_a_run_that_does_not_clip_need_not_take_the_norm() -> None:
    config = {"gradient_clipping": 0.0}
    extras = tuple(own for own in base().index.extras if own.name not in ("optimizer", "ds_config"))
    index = replace(base().index, extras=(*extras, Extra(name="ds_config", value=config)))
    norms = Norms(run_facts(index, TargetOptions(), ranks=1, stage=1))
    one, other = [group.params[0].name for group in norms.groups]
    with pytest.raises(TopologyError, match=r"that has zero_optimization\.compute_grad_norm=false, or takes no step"):
        list(norms.notes([{one: 0, other: 1}, {other: 0}], list, anyway=False))
