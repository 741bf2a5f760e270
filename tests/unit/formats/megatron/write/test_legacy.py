"""Legacy files for one layout, made from those of another, compared with files that were cut for it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from ucp.errors import TopologyError

MODEL, BUFFERS = "model_optim_rng.pt", "distrib_optim.pt"
CELLS = [
    ({"kind": "gpt", "tied": True}, {"tp": 2, "pp": 2, "tied": True}, "whole"),
    ({"kind": "gpt", "tied": True, "pp": 2}, {"tp": 4, "tied": True}, "none"),
    ({"kind": "mixtral", "tp": 2, "ep": 2, "etp": 1, "dp": 1}, {"pp": 2}, "L3a"),
    ({"kind": "mixtral", "tp": 2, "pp": 2}, {"tp": 2, "ep": 2, "dp": 2}, "whole"),
]
"""What real files do not show; those are compared by tests/golden/megatron/test_megatron_write.py."""


def topology(layout: dict[str, Any]) -> str:
    return ",".join(f"{axis}={layout[axis]}" for axis in ("tp", "pp", "vpp", "ep", "etp", "dp") if axis in layout)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def equal(ours: Any, theirs: Any, where: str = "") -> None:
    """What they hold, in any order of keys."""
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            equal(ours[key], value, f"{where}/{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            equal(a, b, f"{where}/{number}")
    else:
        assert ours == theirs, where


def without_output_state(model: dict[str, Any]) -> dict[str, Any]:
    """Of an untied output layer the files we compare with do not keep the (empty) extra state."""
    return {key: value for key, value in model.items() if key != "output_layer._extra_state"}


@pytest.mark.parametrize(
    ("a", "b", "optimizer"),
    CELLS,
    ids=lambda own: own if isinstance(own, str) else topology(own) or "one rank",
)
def test_files_of_another_layout(a, b, optimizer, fake_legacy, to_megatron, tmp_path):
    src = fake_legacy(**a, optimizer=optimizer).save(tmp_path / "a")
    wanted = fake_legacy(**{"kind": a["kind"], "dp": 1, **b}, optimizer=optimizer)
    to_megatron(src, tmp_path / "b", topology(b), "torch", use_distributed_optimizer=optimizer != "whole")
    root = tmp_path / "b" / "iter_0000010"
    assert {path.parent.name for path in root.rglob(MODEL)} == set(wanted.roots)
    for name, theirs in wanted.roots.items():
        ours = load(root / name / MODEL)
        for key in (key for key in theirs if key.startswith("model")):
            equal(without_output_state(ours[key]), without_output_state(theirs[key]), f"{name}/{key}")
        assert ("optimizer" in ours) == (optimizer != "none")
        if optimizer == "whole":
            assert_whole(ours["optimizer"], theirs["optimizer"])
        if optimizer == "L3a":
            equal(load(root / name / BUFFERS), wanted.buffers[name], name)
        assert (root / name / BUFFERS).exists() == (optimizer == "L3a")
    assert (tmp_path / "b" / "latest_checkpointed_iteration.txt").read_text() == "10"


def assert_whole(ours: Any, theirs: Any) -> None:
    """States, masters and numbers of parameters; of groups what tells them apart."""
    members = list(zip(ours, theirs, strict=True)) if isinstance(theirs, list) else [(ours, theirs)]
    for own, other in members:
        groups, wanted = own["optimizer"]["param_groups"], other["optimizer"]["param_groups"]
        kept = [at for at in range(len(wanted)) if at < len(groups) or wanted[at]["params"]]
        equal(own["fp32_from_fp16_params"], [other["fp32_from_fp16_params"][at] for at in kept])
        for group, at in zip(groups, kept, strict=True):
            assert (group["params"], group["wd_mult"]) == (wanted[at]["params"], wanted[at]["wd_mult"])
        for number, state in other["optimizer"]["state"].items():
            found = own["optimizer"]["state"][number]
            equal({**found, "step": torch.tensor(found["step"])}, state)


@pytest.mark.parametrize("bucket", [1, 700])
def test_buckets_of_the_first_chunk(bucket, fake_legacy, to_megatron, tmp_path):
    src = fake_legacy(kind="gpt", optimizer="L3a").save(tmp_path / "a")
    wanted = fake_legacy(kind="gpt", tp=2, pp=2, dp=2, optimizer="L3a", bucket=bucket)
    options = {"overlap_grad_reduce": True, "ddp_bucket_size": bucket}
    to_megatron(src, tmp_path / "b", "tp=2,pp=2,dp=2", "torch", **options)
    for name, theirs in wanted.buffers.items():
        equal(load(tmp_path / "b" / "iter_0000010" / name / BUFFERS), theirs, name)


def test_names_of_transformer_engine(fake_legacy, to_megatron, tmp_path):
    src = fake_legacy(kind="mixtral", optimizer="none").save(tmp_path / "a")
    wanted = fake_legacy(kind="mixtral", tp=2, ep=2, dp=2, optimizer="none", style="te")
    options = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True}
    to_megatron(src, tmp_path / "b", "tp=2,ep=2,dp=2", "torch", **options)
    for name, root in wanted.roots.items():
        ours = load(tmp_path / "b" / "iter_0000010" / name / MODEL)["model"]
        theirs = {key: value for key, value in root["model"].items() if value is not None}
        equal({key: value for key, value in ours.items() if value is not None}, theirs, name)


def test_grouped_experts_are_registered_by_projection(fake_legacy, to_megatron, tmp_path):
    """transformer_engine.py of 0.16: TEGroupedLinear has all first projections before the second ones."""
    run = fake_legacy(kind="mixtral", layers=1, optimizer="L3a")
    src = run.save(tmp_path / "a")
    options = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True}
    to_megatron(src, tmp_path / "b", "dp=1", "torch", **options)
    flat = load(tmp_path / "b" / "iter_0000010" / "mp_rank_00" / BUFFERS)[0][torch.bfloat16, torch.float32]["param"]
    reverse = ["output_layer.weight", "decoder.final_layernorm.weight"]
    experts = "decoder.layers.0.mlp.experts.local_experts"
    reverse += [f"{experts}.{expert}.linear_fc2.weight" for expert in reversed(range(4))]
    reverse += [f"{experts}.{expert}.linear_fc1.weight" for expert in reversed(range(4))]
    at = 0
    for name in reverse:
        values = run.masters[name].flatten()
        assert torch.equal(flat[at : at + values.numel()], values), name
        at += -(-values.numel() // 64) * 64


def test_arguments_are_those_of_the_new_layout(fake_legacy, to_megatron, tmp_path):
    src = fake_legacy(kind="llama", tp=2, optimizer="L3a").save(tmp_path / "a")
    to_megatron(src, tmp_path / "b", "tp=1,pp=2,vpp=2,dp=3", "torch")
    args = load(tmp_path / "b" / "iter_0000010" / "mp_rank_00_001" / MODEL)["args"]
    assert isinstance(args, Namespace)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (1, 2)
    assert (args.virtual_pipeline_model_parallel_size, args.data_parallel_size, args.world_size) == (2, 3, 6)
    assert (args.ckpt_format, args.no_save_rng, args.hidden_size, args.rank) == ("torch", True, 8, 3)


def test_random_states_stay_where_the_layout_does(fake_legacy, to_megatron, tmp_path):
    run = fake_legacy(kind="gpt", tp=2, pp=2, dp=2, optimizer="whole")
    src = run.save(tmp_path / "a")
    report = to_megatron(src, tmp_path / "same", "tp=2,pp=2,dp=2", "torch")
    for name, root in run.roots.items():
        ours = load(tmp_path / "same" / "iter_0000010" / name / MODEL)
        equal(ours["rng_state"], root["rng_state"])
        assert not getattr(ours["args"], "no_save_rng", False)
    assert not any("RNG states" in line for line in report.dropped)
    other = to_megatron(src, tmp_path / "other", "tp=2,pp=2", "torch")
    assert any("RNG states" in line and "--no-load-rng" in line for line in other.dropped)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=3", "dims: tp=3 does not divide"),
        ("pp=3", "3 stages of 1 chunk do not divide"),
        ("ep=3,dp=3", "ep=3 does not divide 4"),
        ("ep=2", "raise dp to a multiple of 2"),
        ("tp=2,ep=2,etp=2,zero=1,dp=2", "zero=1"),
    ],
)
def test_layouts_that_do_not_fit(layout, message, fake_legacy, to_megatron, tmp_path):
    src = fake_legacy(kind="mixtral", optimizer="L3a").save(tmp_path / "a")
    with pytest.raises(TopologyError, match=message):
        to_megatron(src, tmp_path / "b", layout, "torch")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("topology", ["tp=1,ep=2,etp=2,dp=4", "tp=2,etp=4,dp=2"])
def test_ranks_that_would_overwrite_one_another(topology, fake_legacy, to_megatron, tmp_path):
    """Before, half of every expert was left out with ep=1, and nothing said."""
    src = fake_legacy(kind="mixtral", optimizer="L3a").save(tmp_path / "a")
    with pytest.raises(TopologyError, match="under one name"):
        to_megatron(src, tmp_path / "b", topology, "torch")
