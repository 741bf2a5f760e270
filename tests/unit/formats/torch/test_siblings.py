"""States and settings that a parameter lacks and others like it have, as real optimizers keep them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ucp

Optimizers = Callable[[nn.Module], Iterable[torch.optim.Optimizer]]


class Model(nn.Module):
    """A convolution, an embedding with a tied head, a frozen matrix and one that is not stepped."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.conv, self.norm = nn.Conv1d(4, 4, 1), nn.LayerNorm(4)
        self.up, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("mask", torch.ones(2))

    def forward(self) -> torch.Tensor:
        hidden = self.norm(self.up(self.frozen(self.embedding(torch.arange(5)))))
        return self.head(self.conv(hidden[..., None])[..., 0]).square().sum()


def _save(folder: Path, optimizers: Optimizers, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    """A flattened checkpoint of a run, without the paths that torch records: `change` renames what it will."""
    torch.manual_seed(0)
    model = Model()
    running = list(optimizers(model))
    for _ in range(2):
        model().backward()
        for optimizer in running:
            optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        weights, states = get_state_dict(model, running, options=options)
        saved = {**weights, **states}
        change(saved)
        dcp.save(saved, checkpoint_id=folder, no_dist=True, planner=DefaultSavePlanner(flatten_state_dict=False))
    return folder


def _trained(model: nn.Module, *, is_matrix: bool) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and (p.dim() > 1) == is_matrix]


def _adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    groups = [{"params": _trained(model, is_matrix=True)}, {"params": _trained(model, is_matrix=False), "lr": 0.5}]
    return [torch.optim.AdamW(groups)]


def _amsgrad_of_one(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.AdamW([{"params": [first], "amsgrad": True, "lr": 0.5}, {"params": rest}])]


def _muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    flat = [p for p in model.parameters() if p.requires_grad and p.dim() != 2]
    return [torch.optim.Muon([p for p in _trained(model, is_matrix=True) if p.dim() == 2]), torch.optim.AdamW(flat)]


def _named_group(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest, "kind": "rest"}], momentum=0.9)]


def _momentum_of_some(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.RMSprop([{"params": [first], "momentum": 0.9}, {"params": rest}])]


@pytest.mark.parametrize(
    "optimizers",
    [
        _adamw,
        _amsgrad_of_one,
        _muon_and_adamw,
        _named_group,
        _momentum_of_some,
        lambda model: [torch.optim.Adafactor(p for p in model.parameters() if p.requires_grad)],
        lambda model: [torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad], centered=True)],
    ],
    ids=[
        "AdamW",
        "amsgrad of one",
        "Muon and AdamW",
        "a group with a name",
        "momentum of some",
        "Adafactor",
        "RMSprop",
    ],
)
def test_optimizers_of_torch_keep_what_they_keep_for_a_reason(optimizers: Optimizers, tmp_path: Path) -> None:
    report = ucp.verify(_save(tmp_path / "run", optimizers))
    assert report.problems == ()


@pytest.mark.parametrize(
    ("key", "damaged", "problem"),
    [
        ("state.up.bias.exp_avg", "state.up.bias.exp_evg", "up.bias: exp_avg"),
        ("state.up.weight.step", "state.up.weight.stgp", "up.weight: step"),
        ("param_groups.up.bias.lr", "param_groups.up.bias.hr", "up.bias: the setting lr"),
        ("param_groups.up.weight.weight_decay", "par!m_groups.up.weight.weight_decay", "up.weight: the setting weight"),
        ("param_groups.norm.bias.amsgrad", "parameters.norm.bias.amsgrad", "norm.bias: the setting amsgrad"),
    ],
)
def test_a_damaged_name_is_a_problem(key: str, damaged: str, problem: str, tmp_path: Path) -> None:
    path = _save(tmp_path / "run", _adamw, lambda saved: saved.update({damaged: saved.pop(key)}))
    (found,) = ucp.verify(path).problems
    assert "1 parameter lacks states or settings that similar parameters have" in found
    assert problem in found
    assert any(problem in warning for warning in ucp.plan(path).warnings)
