from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from tests.strategies import random_array
from ucp.core.index import Extra, ParamGroup
from ucp.core.tensor import DType
from ucp.testing.handmade import Shards, make_index, write_checkpoint

BLOCK_USERS = (
    "transfer.plan.job",
    "transfer.worker",
    "transfer.compare",
    "conversion.prepare",
    "store.describe",
)
"""Modules that know the size of a block."""


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 bytes and tasks of 128, so that small tensors are many of each."""
    shrink(monkeypatch, block=64, task=128)


def shrink(monkeypatch, *, block: int, task: int) -> None:
    for name in BLOCK_USERS:
        module = import_module(f"ucp.{name}")
        if hasattr(module, "BLOCK"):
            monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(import_module("ucp.transfer.plan.job"), "TASK", task)


@pytest.fixture
def source(tmp_path) -> Path:
    """A handmade checkpoint of a few parameters with optimizer states, and checksums of half of them."""
    return handmade(tmp_path / "source")


@pytest.fixture
def arrays() -> dict[tuple[str, str], np.ndarray]:
    return sample_arrays()


def sample_arrays() -> dict[tuple[str, str], np.ndarray]:
    shapes = {"embed": (30, 8), "norm": (8,), "scale": (), "head": (8, 30), "none": (0, 4)}
    found = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        for offset, state in enumerate(("weight", "exp_avg", "exp_avg_sq")):
            found[name, state] = random_array(shape, DType.FLOAT32, 10 * seed + offset, bits=True)
        found[name, "step"] = np.full((), 7.0, dtype=np.float32)
    found["counter", "weight"] = np.int64(12345).reshape(())
    return found


def handmade(folder: Path) -> Path:
    shards = Shards(folder)
    states = {key: shards.whole(array, file=f"{key[1]}.bin") for key, array in sample_arrays().items()}
    records = [
        shards.record(fragment.ref)
        for (_, state), own in states.items()
        for fragment in own.fragments
        if state in ("weight", "exp_avg") and fragment.ref.numel
    ]
    groups = (
        ParamGroup(params=("embed", "head"), hyper={"lr": 1e-3, "betas": (0.9, 0.95)}),
        ParamGroup(params=("norm", "scale", "none"), hyper={"lr": 1e-3, "weight_decay": 0.0}),
    )
    index = make_index(shards.folder, states, groups=groups, records=records)
    write_checkpoint(index)
    return shards.folder


def extras_of(shards: Shards) -> tuple[Extra, ...]:
    """Extras of every kind: plain, of one rank, with objects, with tensors."""
    return (
        Extra(name="lr_scheduler", value={"base_lrs": [1e-3], "last_epoch": 3, "betas": (0.9, float("nan"))}),
        Extra(name="rng/cpu", value=shards.put(np.arange(40, dtype="uint8"), file="rng.bin"), rank=0),
        Extra(name="rng/cpu", value=shards.put(np.arange(40, dtype="uint8")[::-1].copy(), file="rng.bin"), rank=1),
    )


def tree(root: Path) -> dict[str, bytes]:
    """Files below a folder, by path."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def partial(dst: Path) -> Path:
    """The folder in which a destination grows."""
    return dst.with_name(f"{dst.name}.ucp-partial")
