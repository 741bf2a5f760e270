"""What a DeepSpeed configuration says, in every spelling."""

from __future__ import annotations

import pytest
from ucp_formats.deepspeed.config import Precision, RunConfig

from ucp.core.tensor import DType


@pytest.mark.parametrize(
    ("raw", "seen", "expected"),
    [
        ({"bf16": {"enabled": True}}, [], Precision.BF16),
        ({"bfloat16": {"enabled": True}}, [], Precision.BF16),
        ({"fp16": {"enabled": True}}, [], Precision.FP16),
        ({"fp16": {"enabled": False}}, [DType.FLOAT32], Precision.FP32),
        ({"bf16": {"enabled": "auto"}}, [DType.FLOAT32, DType.BFLOAT16], Precision.BF16),
        ({}, [DType.FLOAT16, None], Precision.FP16),
        ({}, [], Precision.FP32),
    ],
)
def test_precision(raw: dict[str, object], seen: list[DType | None], expected: Precision) -> None:
    assert RunConfig(raw).precision(seen) is expected


@pytest.mark.parametrize(
    ("found", "expected"), [(5e8, 500_000_000), ("auto", 10**9), (None, 10**9), (0, 0), (True, 10**9)]
)
def test_sub_group_size(found: object, expected: int) -> None:
    assert RunConfig({"zero_optimization": {"sub_group_size": found}}).sub_group_size == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"optimizer": {"type": "AdamW"}}, True),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, False),
        ({"optimizer": {"type": "Lion"}}, False),
        ({"optimizer": {"type": "Adam"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, False),
        ({"optimizer": {"type": "Adam"}, "zero_optimization": {"cpu_offload": True}}, False),
        ({}, False),
    ],
)
def test_fused_adam(raw: dict[str, object], expected: bool) -> None:
    assert RunConfig(raw).names_fused_adam is expected


@pytest.mark.parametrize(
    ("kept", "expected"), [("fp32", True), ("torch.float32", True), ("bf16", False), (None, False)]
)
def test_bf16_optimizer(kept: object, expected: bool) -> None:
    config = RunConfig({"data_types": {"grad_accum_dtype": kept}})
    assert config.uses_bf16_optimizer(Precision.BF16) is expected
    assert not config.uses_bf16_optimizer(Precision.FP32)


def test_another_stage_keeps_everything_else() -> None:
    raw = {"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": True}}
    assert RunConfig(raw).with_stage(3) == {
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "bf16": {"enabled": True},
    }
    assert raw["zero_optimization"]["stage"] == 1


def test_gradient_clipping_is_unknown_without_a_configuration() -> None:
    assert RunConfig({}).gradient_clipping is None
    assert RunConfig({"bf16": {}}).gradient_clipping == 0.0
