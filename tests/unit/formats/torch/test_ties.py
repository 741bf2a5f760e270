"""Matrices of equal elements, saved by torch: tied where they are stored once, and only equal elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ucp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _saved(model: nn.Module, trained: list[str]) -> dict[str, object]:
    optimizer = torch.optim.AdamW([dict(model.named_parameters())[name] for name in trained], lr=0.0)
    for name in trained:
        model.get_parameter(name).grad = torch.randn_like(model.get_parameter(name))
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _matrices(names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})


@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_zeros_are_no_ties_where_the_optimizer_numbers_its_parameters(way: str, tmp_path: Path) -> None:
    model = _matrices("abc")
    for name in "ab":
        nn.init.zeros_(model.get_parameter(f"{name}.weight"))
    saved = _saved(model, ["b.weight", "c.weight"])
    if way == "dcp":
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    else:
        torch.save(saved, tmp_path / "checkpoint.pt")

    index = ucp.inspect(tmp_path)
    assert index.unnamed is not None
    assert not index.aliases


def test_a_matrix_that_is_stored_once_is_tied(tmp_path: Path) -> None:
    model = _matrices("ab")
    model["c"] = nn.Linear(4, 4, bias=False)
    model["c"].weight = model["a"].weight
    torch.save(_saved(model, ["a.weight", "b.weight"]), tmp_path / "checkpoint.pt")

    index = ucp.inspect(tmp_path)

    assert index.aliases == {"c.weight": "a.weight"}
    assert torch.equal(ucp.open(tmp_path).read("b.weight", "weight"), model.state_dict()["b.weight"])
