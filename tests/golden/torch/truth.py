"""Fixtures of PyTorch, and what was gathered from their live ranks."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from safetensors.torch import load_file

import ucp
from tests.golden.truth import FIXTURES, check_equal, is_same, read_states
from ucp.core.index import Index

ROOT = FIXTURES / "torch"
REPORTS: dict[str, Any] = {path.parent.name: json.loads(path.read_text()) for path in ROOT.glob("*/truth.json")}


@cache
def index_of(case: str) -> Index:
    return ucp.inspect(ROOT / case / "checkpoint")


def truth_of(case: str) -> dict[str, torch.Tensor]:
    return load_file(ROOT / case / "truth.safetensors")


def check_states(index: Index, truth: dict[str, torch.Tensor]) -> None:
    """Every state of the truth, bit for bit, and no other."""
    wanted = dict(truth)
    for second, first in index.aliases.items():
        assert is_same(wanted.pop(f"{second}/weight"), wanted[f"{first}/weight"])
    check_equal(read_states(index), wanted)
