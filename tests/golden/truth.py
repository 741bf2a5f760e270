"""Kept checkpoints beside the truth that was gathered inside their runs: one comparison for all formats."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ucp.conversion.prepare import SilentObserver
from ucp.core.gaps import check_cover
from ucp.core.index import Index
from ucp.live.checkpoint import Checkpoint
from ucp.transfer.compare import find_drift

FIXTURES = Path(__file__).parents[2] / "fixtures"


class Stub:
    """Any class of Megatron or DeepSpeed, which need not be installed."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __setstate__(self, state: object) -> None:
        self.values = (state,)

    def __eq__(self, other: object) -> bool:
        return type(other) is Stub and self.values == other.values

    __hash__ = object.__hash__


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Stub if module.startswith(("megatron", "deepspeed")) else super().find_class(module, name)


def load_stubbed(path: Path) -> Any:
    """What a framework saved, without the framework."""
    reader = SimpleNamespace(
        Unpickler=_Unpickler, load=lambda file, **options: _Unpickler(file, **options).load(), __name__="pickle"
    )
    return torch.load(path, weights_only=False, pickle_module=reader)


def read_states(index: Index) -> dict[str, torch.Tensor]:
    """Every state, by NAME/STATE; fragments must tile each."""
    check_cover(index)
    checkpoint = Checkpoint(index)
    return {f"{atom.name}/{state}": checkpoint.read(atom.name, state) for atom, state, _ in index.states()}


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Type, shape and bits."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
    )


def check_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same names, and under each the same tensor, bit for bit."""
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not is_same(found[name], tensor)] == []


def check_copies(index: Index) -> None:
    """Copies are equal, or the masters rounded to the type of the model."""
    assert find_drift(index, SilentObserver()) == []


def plain(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters as a report in JSON has them."""
    found: dict[str, Any] = json.loads(json.dumps(dict(hyper)))
    return found
