"""Layouts that are recognised and not read: each is named, with what was seen and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from ucp_formats.deepspeed.native_source import DeepSpeedFormat

from ucp.errors import UnsupportedError


def refusal(path: Path) -> str:
    assert DeepSpeedFormat().detect(path) is not None, "refused, and yet recognised"
    with pytest.raises(UnsupportedError) as caught:
        DeepSpeedFormat().read(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("layer_00-model_00-model_states.pt", "pipeline parallelism"),
        ("layer_00-model_states.pt", "pipeline parallelism"),
        ("mp_rank_01_model_states.pt", "several model-parallel ranks"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "several model-parallel ranks"),
        ("layer_0_expert_0_mp_rank_00_model_states.pt", "mixture of experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mixture of experts"),
    ],
)
def test_by_name(tmp_path: Path, fake_run, name: str, why: str) -> None:
    path = fake_run(1, 2).save(tmp_path)
    (path / "global_step7" / name).write_bytes(b"")
    message = refusal(path)
    assert f"{name}: {why}" in message


def test_states_on_nvme(tmp_path: Path, fake_run) -> None:
    path = fake_run(3, 2).save(tmp_path)
    (path / "global_step7" / "offloaded_tensors" / "rank00").mkdir(parents=True)
    assert "offload_optimizer device cpu" in refusal(path)


def test_all_reasons_together(tmp_path: Path, fake_run) -> None:
    path = fake_run(1, 2).save(tmp_path)
    for name in ("layer_00-model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt"):
        (path / "global_step7" / name).write_bytes(b"")
    message = refusal(path)
    assert "pipeline" in message
    assert "experts" in message


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("module", None, "pipeline parallelism"),
        ("mp_world_size", 2, "tensor parallelism"),
        ("checkpoint_parallel_dimensions", {"pp_degree": 2, "tp_degree": 1}, "pipeline parallelism"),
        ("checkpoint_parallel_dimensions", {"pp_degree": 1, "tp_degree": 4}, "tensor parallelism"),
        ("num_experts", [4], "mixture of experts"),
        ("ds_autoep_layers", [{}], "mixture of experts"),
        ("autoep_layers", [{}], "mixture of experts"),
        ("ds_config", {"zero_optimization": {"stage": 1, "mics_shard_size": 2}}, "MiCS"),
        ("ds_config", {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "NVMe"),
    ],
)
def test_by_what_the_model_states_say(tmp_path: Path, fake_run, key: str, value: object, why: str) -> None:
    run = fake_run(1, 2)
    run.models[0][key] = value
    assert why in refusal(run.save(tmp_path))


def test_degrees_of_one_are_no_parallelism(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    run.models[0]["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 1}
    run.models[0]["ds_config"]["zero_optimization"] |= {"mics_shard_size": -1, "offload_optimizer": {"device": "cpu"}}
    assert DeepSpeedFormat().read(run.save(tmp_path)).topology.dp == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda saved: saved.update(base_optimizer_state=[{}]), "elastic_checkpoint"),
        (lambda saved: saved.update(local_sub_partitions_of_fp32_groups=[]), "DeepSpeed 0.3"),
        (lambda saved: saved.update(ds_zero_partition_groups=[{}]), "mixture of experts"),
        (lambda saved: saved["base_optimizer_state"]["param_groups"][1].update(moe=True), "mixture of experts"),
    ],
)
def test_by_what_the_optimizer_says(tmp_path: Path, fake_run, change, why: str) -> None:
    run = fake_run(1, 2)
    for root in run.optimizers:
        change(root["optimizer_state_dict"])
    assert why in refusal(run.save(tmp_path))


def test_a_reason_is_given_once_however_many_files_show_it(tmp_path: Path, fake_run) -> None:
    run = fake_run(3, 8)
    for root in run.models:
        root["mp_world_size"] = 2
    assert refusal(run.save(tmp_path)).count("tensor parallelism") == 1


def test_a_buffer_laid_out_in_an_unknown_way(tmp_path: Path, fake_run) -> None:
    """The module's tensors are views of the buffer; here they say another order than param_shapes."""
    import torch

    run = fake_run(1, 2, groups=({"a": (6,), "b": (2,)},))
    buffer = torch.arange(8, dtype=torch.bfloat16)
    run.models[0]["module"] |= {"b": buffer[:2], "a": buffer[2:], "head": buffer[2:]}
    message = refusal(run.save(tmp_path))
    assert "a: module has it elsewhere in the buffer" in message
    assert "report it" in message
