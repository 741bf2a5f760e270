"""What files hold besides tensors of the model, and what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ucp_formats.megatron.source import MegatronFormat

from ucp.core.index import Index
from ucp.errors import MalformedError, MissingFileError, UnsupportedError


def read(folder: Path) -> Index:
    return MegatronFormat().read(folder)


def names(index: Index) -> list[str]:
    return [extra.name for extra in index.extras]


def test_what_ranks_differ_in_is_kept_for_each(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="mixtral", ep=2, optimizer="none")
    for number, root in enumerate(run.roots.values()):
        root["rerun_state_machine"] = {"mode": number}
        root["num_floating_point_operations_so_far"] = 5
        root["args"].nccl_port = number
    index = read(run.save(tmp_path))
    assert "rerun_state_machine/pp0.tp0.ep1" in names(index)
    assert names(index).count("num_floating_point_operations_so_far") == 1
    assert [line for line in index.dropped if "nccl_port" in line]
    assert not [line for line in index.dropped if "local_rank" in line]


def test_extra_states_are_kept_where_they_hold_something(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", optimizer="none")
    model = run.roots["mp_rank_00"]["model"]
    model["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(0, dtype=torch.uint8)
    model["decoder.layers.0.mlp.linear_fc2._extra_state"] = torch.ones(3, dtype=torch.uint8)
    model["decoder.note"] = "hello"
    index = read(run.save(tmp_path))
    assert "extra_state/mp_rank_00/0/decoder.layers.0.mlp.linear_fc2._extra_state" in names(index)
    assert "model/mp_rank_00/0/decoder.note" in names(index)
    assert not [name for name in names(index) if "linear_fc1" in name]


def test_files_that_are_not_read_are_named(fake_legacy, tmp_path: Path) -> None:
    folder = fake_legacy(kind="llama", optimizer="none").save(tmp_path)
    for name in ("layer_wise_optimizer_0.pt", "train_dataloader_dprank000.pt"):
        (folder / "iter_0000010" / "mp_rank_00" / name).write_bytes(b"")
    index = read(folder)
    assert [line.partition(":")[0] for line in index.dropped] == [
        "mp_rank_00/layer_wise_optimizer_0.pt",
        "mp_rank_00/train_dataloader_dprank000.pt",
    ]


def test_a_parameter_that_one_rank_lacks(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", tp=2, optimizer="none")
    for name in ("decoder.layers.0.mlp.linear_fc2.weight", "output_layer.weight"):
        del run.roots["mp_rank_01"]["model"][name]
    with pytest.raises(MissingFileError, match=r"(?s)2 parameters .*\n  output_layer\.weight: .*rank 1"):
        read(run.save(tmp_path))


def test_experts_need_their_number(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="mixtral", ep=2, optimizer="none")
    for root in run.roots.values():
        del root["args"].num_experts
    with pytest.raises(MalformedError, match="num_experts"):
        read(run.save(tmp_path))


def test_a_checkpoint_without_arguments(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="gpt", tp=2, pp=2, optimizer="none")
    for root in run.roots.values():
        del root["args"]
    index = read(run.save(tmp_path))
    assert set(index.atoms) == set(run.masters)
    assert "args" not in names(index)


@pytest.mark.parametrize(
    ("model", "facts"),
    [(None, "dict .*; got None"), ({}, "iter_0000010; .*no tensor"), ({"a": {"_extra_state": None}}, "no tensor")],
)
def test_a_model_of_nothing(fake_legacy, tmp_path: Path, model: object, facts: str) -> None:
    run = fake_legacy(kind="llama", optimizer="none")
    run.roots["mp_rank_00"]["model"] = model
    with pytest.raises(MalformedError, match=facts):
        read(run.save(tmp_path))


def test_a_file_of_something_else(fake_legacy, tmp_path: Path) -> None:
    run = fake_legacy(kind="llama", optimizer="none")
    run.roots["mp_rank_00"] = [1]
    with pytest.raises(UnsupportedError, match=r"mp_rank_00/model_optim_rng\.pt: .*dict .*; got a list"):
        read(run.save(tmp_path))


@pytest.mark.parametrize(
    ("buffers", "error", "facts"),
    [
        (7, MalformedError, r"distrib_optim\.pt; got a int \(7\)"),
        ({"what": 1}, UnsupportedError, "buffers .*; got 'what'$"),
        ({0: {torch.float32: {"exp_avg": torch.ones(4)}}}, MalformedError, "'param' .*; got exp_avg$"),
        ({0: {torch.float32: {"param": torch.ones(2, 2)}}}, MalformedError, r"'param' .*\[2, 2\]"),
        ([{}, {}], MalformedError, r"1 optimizer .*distrib_optim\.pt.*; got 2"),
    ],
)
def test_buffers_of_something_else(fake_legacy, tmp_path: Path, buffers: object, error: type, facts: str) -> None:
    run = fake_legacy(kind="llama", optimizer="L3a")
    run.buffers["mp_rank_00"] = buffers
    with pytest.raises(error, match=facts):
        read(run.save(tmp_path))
