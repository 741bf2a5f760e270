"""Runs that go on from files of torch.save: those that ranks saved for themselves, and those that `--to torch` wrote.

Every resume is by the real framework in a model of another seed. What it holds after the load is compared bit for bit,
and its losses with those of the run that was never interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ucp
from tests.integration.torch.test_dcp_resume import FIXTURES, check, resumed, truth_of

sys.path.insert(0, str(FIXTURES / "make" / "deepspeed"))

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("verl-fsdp2-dp4", "ddp-dp2"),
        ("verl-fsdp2-dp2-tp2", "fsdp2-pp2-dp2"),
        ("verl-fsdp1-dp4", "fsdp2-pp2-dp2"),
        ("fsdp1-local-dp4", "fsdp2-pp2-dp2"),
        ("ddp-dp2-nanogpt", "hsdp-dp2x2"),
    ],
)
def test_files_go_on_as_a_distributed_checkpoint(source: str, target: str, tmp_path: Path) -> None:
    style = "flattened" if "pp2" in target else "nested"
    written = tmp_path / "written"
    ucp.convert(FIXTURES / "torch" / source / "checkpoint", written, to="dcp", settings={"style": style})
    foreign = () if source.startswith("verl-fsdp2") else ("--foreign",)
    report, found = resumed(target, written, tmp_path / "out", *foreign)
    wanted, truth = truth_of("torch", source)
    check({name: own for name, own in found.items() if name in truth}, truth)
    assert found.keys() >= truth.keys() - {name for name in truth if name.startswith("head.weight")}
    if not foreign:
        assert report["losses_after"] == pytest.approx(wanted["losses_after"], rel=1e-5)


@pytest.mark.parametrize("source", ["verl-fsdp1-dp4", "verl-fsdp2-dp2-tp2", "hsdp-dp2x2", "fsdp1-dp4"])
def test_a_plain_script_goes_on_from_the_file(source: str, tmp_path: Path) -> None:
    ucp.convert(FIXTURES / "torch" / source / "checkpoint", tmp_path / "out", to="torch", verify=True)
    report, truth = truth_of("torch", source)
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    losses, found = plain_run(report["case"]["model"], state)
    check(found, truth)
    assert losses == pytest.approx(report["losses_after"], rel=1e-5)


def plain_run(kind: str, state: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of five steps from `state` on, in one process with torch alone, and what it held before them."""
    from deepspeed_model import ParallelModel, TinyModel, global_batch, next_token_loss

    torch.manual_seed(1)
    model = ParallelModel() if kind == "parallel" else TinyModel(omit=frozenset({"scalar", "void"}))
    shape = model.batch_shape
    model.load_state_dict(state["model"])
    params = dict(model.named_parameters())
    groups = [{"params": [params[name] for name in own["param_names"]]} for own in state["optimizer"]["param_groups"]]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(state["optimizer"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    scheduler.load_state_dict(state["lr_scheduler"])
    optimizer.load_state_dict(state["optimizer"])  # a scheduler sets the rate when it is made
    found = {f"{name}/{key}": own.clone() for name in params for key, own in optimizer.state[params[name]].items()}
    losses = []
    for at in range(3, 8):
        rows = global_batch(step=at, shape=shape)
        loss = next_token_loss(model(rows), rows)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, found
