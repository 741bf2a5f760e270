"""Saves into a chain: its links, and what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ucp
from ucp.errors import DestinationError, UsageError


def make_model(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return model


def save(chain: Path, step: int) -> ucp.SaveReport:
    return ucp.save(make_model(step), None, None, chain / f"step{step}", step=step, chain=True)


def test_every_save_is_a_link(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path / "chain", step)
    links = json.loads((tmp_path / "chain" / "chain.json").read_text())["links"]
    assert links == [{"path": "step10", "iteration": 10}, {"path": "step20", "iteration": 20}]
    assert ucp.open(tmp_path / "chain").read("weight")[0, 0].item() == 20
    assert ucp.open(tmp_path / "chain", at=15).read("weight")[0, 0].item() == 10


def test_a_link_is_newer_than_the_last_and_has_a_step(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for step in (None, 9, 10):
        with pytest.raises(UsageError):
            ucp.save(make_model(0), None, None, tmp_path / "other", step=step, chain=True)
    with pytest.raises(DestinationError):  # a link stays
        ucp.save(make_model(0), None, None, tmp_path / "step10", step=30, chain=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chain.json", "step10"]


class KilledError(BaseException):
    """What stands for the end of the process."""


def kill_at(number: int, patched: pytest.MonkeyPatch) -> Callable[[], int]:
    """End the process at that change of the disk; returns how many there were."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > number:
                raise KilledError
            return function(*arguments, **options)

        return change

    for name in ("pwrite", "mkdir", "rmdir", "unlink", "rename", "replace", "fsync"):
        patched.setattr(os, name, counted(getattr(os, name)))
    return lambda: count


def test_a_kill_at_any_change_leaves_the_chain_at_a_link(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    save(chain, 10)
    shutil.copytree(chain, tmp_path / "start")
    for number in range(200):
        shutil.rmtree(chain)
        shutil.copytree(tmp_path / "start", chain)
        with pytest.MonkeyPatch.context() as patched:
            changes = kill_at(number, patched)
            with suppress(KilledError):
                save(chain, 20)
            total = changes()
        value = 10 if total > number else 20
        checkpoint = ucp.open(chain)
        assert checkpoint.step in (value, 20)
        assert torch.all(checkpoint.read("weight") == checkpoint.step)
        assert ucp.verify(chain).ok
        if checkpoint.step == 10:
            save(chain, 20)  # whatever is left
            assert ucp.open(chain).step == 20
        if total <= number:
            break
    assert 15 < total < 200
