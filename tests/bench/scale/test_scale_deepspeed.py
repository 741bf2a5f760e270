"""Synthetic checkpoints of DeepSpeed beside those that DeepSpeed wrote: file by file, key by key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import ucp
from tests.bench.scale.deepspeed import (
    Experts,
    Group,
    expert_groups,
    write_expert_run,
)
from tests.bench.scale.moe import Moe
from ucp.core.tensor import TensorRef
from ucp.io.pickle.values import Stub
from ucp.io.torch_file.archive import read_archive

FIXTURES = Path(__file__).parents[3] / "fixtures" / "deepspeed"


def outline(value: object) -> object:
    """Keys in their order, types and shapes; values of plain settings, not of tensors."""
    if isinstance(value, TensorRef):
        return str(value.dtype), value.shape, value.strides
    if isinstance(value, Stub):
        return str(value.made_by), outline(value.state)
    if isinstance(value, Mapping):
        return type(value).__name__, [(key, outline(own)) for key, own in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [outline(own) for own in value]
    return type(value).__name__, value


def compare(made: Path, fixture: str) -> None:
    kept = FIXTURES / fixture / "checkpoint"
    files = {path.relative_to(kept): path for path in kept.rglob("*") if path.is_file()}
    assert {path.relative_to(made) for path in made.rglob("*") if path.is_file()} == files.keys()
    for name, path in files.items():
        if path.suffix == ".pt":
            ours, theirs = read_archive(str(made / name)), read_archive(str(path))
            assert outline(ours.root) == outline(theirs.root), name
            assert [(r.name, r.nbytes) for r in ours.records] == [(r.name, r.nbytes) for r in theirs.records]
            assert (made / name).stat().st_size == path.stat().st_size


def test_experts_are_written_as_deepspeed_does(tmp_path: Path) -> None:
    dense = {"emb.weight": (11, 8), "moe.deepspeed_moe.gate.wg.weight": (4, 8), "head.weight": (11, 8)}
    start = "moe.deepspeed_moe.experts.deepspeed_experts."
    usual, rest = {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.0}
    own = {"name": "ep_size_2", "moe": True}
    groups = (
        Group(shapes=dense, hyper={**usual, "name": "group0"}, holders=4),
        Group(shapes={f"{start}{n}.weight": (8, 8) for n in range(2)}, hyper={**usual, **own}, holders=2),
        Group(shapes={f"{start}{n}.bias": (8,) for n in range(2)}, hyper={**rest, **own}, holders=2),
    )
    run = Experts(ranks=4, experts=4, groups=groups)
    write_expert_run(tmp_path / "made", dense=dense, experts=[start], own={"weight": (8, 8), "bias": (8,)}, run=run)
    compare(tmp_path / "made", "z1-ep2-dp4-bf16")


@pytest.mark.parametrize(("ranks", "ep"), [(4, 2), (8, 8)])
def test_a_small_run_of_experts_is_read(tmp_path: Path, ranks: int, ep: int) -> None:
    moe = Moe(layers=2, experts=8, hidden=64, ffn=32, head=16, groups=1, vocabulary=128)
    dense, starts, own, run = expert_groups(moe, ranks=ranks, ep=ep)
    write_expert_run(tmp_path / "made", dense=dense, experts=starts, own=own, run=run)
    index = ucp.open(tmp_path / "made").index
    assert (index.topology.dp, index.topology.ep) == (ranks, ep)
    assert sum(atom.states["weight"].numel for atom in index.atoms.values()) == moe.numel
    assert all(set(atom.states) == {"weight", "exp_avg", "exp_avg_sq", "step"} for atom in index.atoms.values())
