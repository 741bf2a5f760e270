"""What `--to torch` writes, read by torch itself with `weights_only=True`, and by plain modules and optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ucp
from ucp.errors import MisfitError, UsageError

ROOT = Path(__file__).parents[3] / "fixtures"
CASES = ("torch/verl-fsdp2-dp2-tp2", "torch/fsdp2-dp2-full", "torch/lightning", "torch/hsdp-dp2x2")


def written(source: Path, out: Path, **options: Any) -> dict[str, Any]:
    ucp.convert(source, out, to="torch", verify=True, **options)
    loaded: dict[str, Any] = torch.load(out / "checkpoint.pt", weights_only=True)
    return loaded


@pytest.mark.parametrize("case", CASES)
def test_the_file_holds_the_truth(case: str, tmp_path: Path) -> None:
    state = written(ROOT / case / "checkpoint", tmp_path / "out")
    truth = load_file(ROOT / case / "truth.safetensors")
    groups = state["optimizer"]["param_groups"]
    names = [name for group in groups for name in group["param_names"]]
    assert [number for group in groups for number in group["params"]] == list(range(len(names)))
    found = {f"{name}/weight": tensor for name, tensor in state["model"].items()}
    for number, states in state["optimizer"]["state"].items():
        found |= {f"{names[number]}/{key}": tensor for key, tensor in states.items()}
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert ucp.diff(ROOT / case / "checkpoint", tmp_path / "out").equal


def test_torch_has_the_same_entries_itself(tmp_path: Path) -> None:
    source = ROOT / "torch" / "ddp-dp2-nanogpt" / "checkpoint"
    state, own = written(source, tmp_path / "out"), torch.load(source / "ckpt.pt", weights_only=True)
    assert state["model"].keys() == own["model"].keys()
    assert state["optimizer"]["state"].keys() == own["optimizer"]["state"].keys()
    for number, states in own["optimizer"]["state"].items():
        assert all(torch.equal(states[key], state["optimizer"]["state"][number][key]) for key in states)
    for group, kept in zip(state["optimizer"]["param_groups"], own["optimizer"]["param_groups"], strict=True):
        assert {key: value for key, value in group.items() if key != "param_names"} == kept
    assert (state["iter_num"], state["config"]) == (own["iter_num"], own["config"])
    assert torch.equal(state["best_val_loss"], own["best_val_loss"])


def test_a_checkpoint_of_deepspeed_loads_into_a_plain_optimizer(tmp_path: Path) -> None:
    state = written(ROOT / "deepspeed" / "z3-dp4-fp32" / "checkpoint", tmp_path / "out")["optimizer"]
    sizes = [own["exp_avg"].shape for own in state["state"].values()]
    groups, at = [], 0
    for group in state["param_groups"]:
        stop = at + len(group["params"])
        groups.append({"params": [torch.nn.Parameter(torch.zeros(size)) for size in sizes[at:stop]]})
        at = stop
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(state)
    truth = load_file(ROOT / "deepspeed" / "z3-dp4-fp32" / "truth.safetensors")
    for group in optimizer.param_groups:
        for param, name in zip(group["params"], group["param_names"], strict=True):
            own = optimizer.state[param]
            assert own["step"].dtype == torch.float32
            assert torch.equal(own["exp_avg"], truth[f"{name}/exp_avg"])
            param.grad = torch.ones_like(param)
    optimizer.step()


def test_a_step_with_dims_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisfitError, match=r"step .*\[1\]"):
        written(ROOT / "deepspeed" / "z1-dp2-counting" / "checkpoint", tmp_path / "out")


def test_weights_alone_and_in_another_type(tmp_path: Path) -> None:
    source = ROOT / "torch" / "hsdp-dp2x2" / "checkpoint"
    state = written(source, tmp_path / "out", include=["*/weight"], dtypes={"weight": "bfloat16"})
    assert state["model"]["l1.weight"].dtype == torch.bfloat16
    assert state["optimizer"]["state"] == {}
    report = ucp.plan(source, to="torch", include=["*/weight"])
    assert not any("load_state_dict" in note for note in report.notes)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"settings": {"style": "nested"}}, "style"),
        ({"settings": {"decoupled_weight_decay": "yes"}}, "true|false"),
        ({"settings": {"decoupled_weight_decay": "false"}}, "drop --set decoupled_weight_decay"),
        ({"compress": True}, "compress"),
        ({"topology": "dp=2"}, "--topology dp=2"),
        ({"tag": "last"}, "tag"),
        ({"dtypes": {"step": "bfloat16"}}, "step in float32"),
    ],
)
def test_what_a_file_cannot_have_is_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=match):
        ucp.convert(ROOT / "torch" / "ddp-dp2" / "checkpoint", tmp_path / "out", to="torch", **options)


def test_tied_names_share_one_storage(tmp_path: Path) -> None:
    model = written(ROOT / "torch" / "hsdp-dp2x2" / "checkpoint", tmp_path / "out")["model"]
    assert model["emb.weight"].untyped_storage().data_ptr() == model["head.weight"].untyped_storage().data_ptr()
    assert ucp.inspect(tmp_path / "out").aliases == {"head.weight": "emb.weight"}
