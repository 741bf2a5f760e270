"""Fixtures of PyTorch, and the comparison of what is read with the truth that was gathered from the live ranks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import ucp
from ucp.core.gaps import check_cover
from ucp.core.index import Index

ROOT = Path(__file__).parents[3] / "fixtures" / "torch"
REPORTS: dict[str, Any] = {path.parent.name: json.loads(path.read_text()) for path in ROOT.glob("*/truth.json")}


@cache
def index_of(case: str) -> Index:
    return ucp.inspect(ROOT / case / "checkpoint")


def truth_of(case: str) -> dict[str, torch.Tensor]:
    return load_file(ROOT / case / "truth.safetensors")


def check_states(case: str) -> None:
    """Every state of a case, bit for bit, and no other."""
    check_cover(index_of(case))
    checkpoint = ucp.open(ROOT / case / "checkpoint")
    index, truth = checkpoint.index, truth_of(case)
    for second, first in index.aliases.items():
        assert torch.equal(truth.pop(f"{second}/weight"), truth[f"{first}/weight"])
    assert {f"{atom.name}/{state}" for atom, state, _ in index.states()} == set(truth)
    for name, wanted in truth.items():
        param, _, state = name.rpartition("/")
        found = checkpoint.read(param, state)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted), name
