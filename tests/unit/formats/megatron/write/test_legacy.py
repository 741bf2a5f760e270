"""Legacy files for one layout, made from those of another, compared with files that were cut for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ucp.errors import TopologyError

MODEL, BUFFERS = "model_optim_rng.pt", "distrib_optim.pt"


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
    ("layout", "facts"),
    [("ep=2", r"\n  ranks: etp x ep = .*\b2,"), ("tp=2,ep=2,etp=2,zero=1,dp=2", "zero=1")],
)
def test_layouts_that_do_not_fit(layout, facts, fake_legacy, to_megatron, tmp_path):
    src = fake_legacy(kind="mixtral", optimizer="L3a").save(tmp_path / "a")
    with pytest.raises(TopologyError, match=facts):
        to_megatron(src, tmp_path / "b", layout, "torch")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("topology", ["tp=1,ep=2,etp=2,dp=4", "tp=2,etp=4,dp=2"])
def test_ranks_that_would_overwrite_one_another(topology, fake_legacy, to_megatron, tmp_path):
    """Before, half of every expert was left out with ep=1, and nothing said."""
    src = fake_legacy(kind="mixtral", optimizer="L3a").save(tmp_path / "a")
    with pytest.raises(TopologyError, match=r"etp=.*--layout torch_dist"):
        to_megatron(src, tmp_path / "b", topology, "torch")


def test_modules_with_an_extra_state_are_those_of_megatron(fake_legacy, to_megatron, tmp_path):
    """Their values are None: comparing what files hold does not show a key that is missing."""
    src = fake_legacy(kind="gpt", optimizer="none", tied=True).save(tmp_path / "a")
    wanted = fake_legacy(kind="gpt", optimizer="none", tied=True, tp=2, dp=1).roots["mp_rank_00"]["model"]
    to_megatron(src, tmp_path / "b", "tp=2", "torch")
    written = load(tmp_path / "b" / "iter_0000010" / "mp_rank_00" / MODEL)["model"]
    assert written.keys() - {"output_layer._extra_state"} == wanted.keys()
