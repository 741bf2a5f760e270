"""Which dict of tensors is the model, beside averages and further models, saved by torch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ucp
from ucp.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Save = Callable[[dict[str, object], Path], Path]


def _stepped(model: nn.Module, *, named: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    for own in model.parameters():
        own.grad = torch.randn_like(own)
    optimizer.step()
    return optimizer


def _net(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def _torch(saved: dict[str, object], folder: Path) -> Path:
    torch.save(saved, folder / "checkpoint.pt")
    return folder


def _dcp(saved: dict[str, object], folder: Path) -> Path:
    dcp.save(saved, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("save", [_torch, _dcp])
def test_an_average_is_an_extra(save: Save, *, named: bool, tmp_path: Path) -> None:
    model = _net(4, 8, 5)
    average = AveragedModel(model)
    optimizer = _stepped(model, named=named)
    saved = {"ema": average.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}

    path = save(saved, tmp_path)
    read = ucp.open(path)

    assert set(read.atoms) == set(model.state_dict())
    assert all(torch.equal(read.read(name, "weight"), own) for name, own in model.state_dict().items())
    assert any("1 more dict of tensors" in note and "ema" in note for note in ucp.inspect(path).notes)


@pytest.mark.parametrize("save", [_torch, _dcp])
def test_equal_dicts_are_refused_by_name(save: Save, tmp_path: Path) -> None:
    model = _net(4, 8)
    saved = {"averaged": deepcopy(model).state_dict(), "live": model.state_dict()}

    path = save({**saved, "optimizer": _stepped(model, named=True).state_dict()}, tmp_path)

    with pytest.raises(UnsupportedError, match=r"(?s); got 2, .*\n  averaged\n  live\n"):
        ucp.open(path)


def test_the_model_is_what_the_optimizer_trains_and_no_more(tmp_path: Path) -> None:
    student, teacher = _net(4, 8), _net(4, 8, 2)
    saved = {"teacher": teacher.state_dict(), "student": student.state_dict()}

    read = ucp.open(_torch({**saved, "optimizer": _stepped(student).state_dict()}, tmp_path))

    assert torch.equal(read.read("0.weight", "weight"), student.state_dict()["0.weight"])


def test_two_models_with_an_optimizer_each_are_refused(tmp_path: Path) -> None:
    one, other = _net(4, 8), _net(4, 8)
    saved = {"one": one.state_dict(), "other": other.state_dict()}
    optimizers = {"of one": _stepped(one).state_dict(), "of other": _stepped(other).state_dict()}

    with pytest.raises(UnsupportedError, match=r"; got 2, .*\n  one\n  other\n"):
        ucp.open(_torch({**saved, **optimizers}, tmp_path))
    with pytest.raises(UnsupportedError, match=r"optimizers .*\n  0\.bias\n  0\.weight\n"):
        ucp.open(_torch({"one": saved["one"], **optimizers}, tmp_path))


@pytest.mark.parametrize("save", [_torch, _dcp])
def test_an_average_is_an_extra_without_an_optimizer(save: Save, tmp_path: Path) -> None:
    model = _net(4, 8)
    average = AveragedModel(deepcopy(model))
    _stepped(model)

    read = ucp.open(save({"ema": average.state_dict(), "model": model.state_dict()}, tmp_path))

    assert torch.equal(read.read("0.weight", "weight"), model.state_dict()["0.weight"])
