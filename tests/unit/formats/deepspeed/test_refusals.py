"""Layouts that are recognised and not read: each is named, with what was seen and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from ucp_formats.deepspeed.read.source import DeepSpeedFormat

from ucp.errors import UnsupportedError

LAYER = {"expert_key_prefix": "mlp.experts", "num_experts": 4, "ep_size": 2, "expert_placement": {"version": 2}}
"""A layer of AutoEP as a later version may record it."""


def refusal(path: Path) -> str:
    assert DeepSpeedFormat().detect(path) is not None, "refused, and yet recognised"
    with pytest.raises(UnsupportedError) as caught:
        DeepSpeedFormat().read(path)
    return str(caught.value)


def test_states_on_nvme(tmp_path: Path, fake_run) -> None:
    path = fake_run(3, 2).save(tmp_path)
    (path / "global_step7" / "offloaded_tensors" / "rank00").mkdir(parents=True)
    assert "offload_optimizer device cpu" in refusal(path)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("folding", {"version": 1}, "AutoEP"),
        ("ds_autoep_layers", [LAYER], "expert_placement"),
        ("ds_config", {"zero_optimization": {"stage": 1, "mics_shard_size": 2}}, "MiCS"),
        ("ds_config", {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "NVMe"),
    ],
)
def test_by_what_the_model_states_say(tmp_path: Path, fake_run, key: str, value: object, why: str) -> None:
    run = fake_run(1, 2)
    run.models[0][key] = value
    assert why in refusal(run.save(tmp_path))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda saved: saved.update(base_optimizer_state=[{}]), "elastic_checkpoint"),
        (lambda saved: saved.update(local_sub_partitions_of_fp32_groups=[]), "DeepSpeed 0.3"),
    ],
)
def test_by_what_the_optimizer_says(tmp_path: Path, fake_run, change, why: str) -> None:
    run = fake_run(1, 2)
    for root in run.optimizers:
        change(root["optimizer_state_dict"])
    assert why in refusal(run.save(tmp_path))


def test_a_buffer_laid_out_in_an_unknown_way(tmp_path: Path, fake_run) -> None:
    """The module's tensors are views of the buffer; here they say another order than param_shapes."""
    import torch

    run = fake_run(1, 2, groups=({"a": (6,), "b": (2,)},))
    buffer = torch.arange(8, dtype=torch.bfloat16)
    run.models[0]["module"] |= {"b": buffer[:2], "a": buffer[2:], "head": buffer[2:]}
    assert "\n  a: module " in refusal(run.save(tmp_path))
