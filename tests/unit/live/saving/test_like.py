"""Saves of plain tensors that ranks cut: a checkpoint of the same model has their global shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim

import ucp
from tests.unit.live.cluster import Place, Saved, Sizes, local, module
from tests.unit.live.threads import ThreadRanks
from tests.unit.live.threads import run as run_threads
from ucp.core.topology import Topology
from ucp.errors import UnsupportedError


def load(saved: Saved, topology: str, ranks: ThreadRanks) -> tuple[nn.Module, optim.Optimizer]:
    (held,) = local(saved, Place(Topology.parse(topology), ranks.rank))
    model = module({name: states["weight"].shape for name, (_, states) in held.items()})
    optimizer = optim.AdamW(model.parameters())
    ucp.load_into(model, topology, saved.path, optimizer=optimizer, process_group=ranks)
    return model, optimizer


@pytest.mark.parametrize("topology", ["tp=2", "tp=2,pp=2", "dp=2,tp=2,ep=2"])
def test_what_was_loaded_is_saved_again(topology: str, tmp_path: Path) -> None:
    saved = Saved(tmp_path / "saved", Sizes(layers=2))

    def save(ranks: ThreadRanks) -> None:
        model, optimizer = load(saved, topology, ranks)
        for step in (9, 10):  # the second as the first link is
            path, like = tmp_path / "chain" / f"step{step}", saved.path if step == 9 else None
            options: dict[str, Any] = {"like": like, "step": step, "chain": True, "process_group": ranks}
            ucp.save(model, optimizer, topology, path, **options)

    assert run_threads(Topology.parse(topology).ranks, save) == [None] * Topology.parse(topology).ranks
    for step in (9, 10):
        store = tmp_path / "chain" / f"step{step}"
        difference = ucp.diff(saved.path, store)
        assert difference.equal, difference
        assert ucp.verify(store).ok
        assert ucp.inspect(store).topology == Topology.parse(topology)


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    saved, other = Saved(tmp_path / "saved", Sizes(layers=1)), Saved(tmp_path / "other", Sizes(layers=1, vocab=12))

    def save(ranks: ThreadRanks) -> None:
        model, optimizer = load(saved, "tp=2", ranks)
        ucp.save(model, optimizer, "tp=2", tmp_path / "run", like=other.path, process_group=ranks)

    for error in run_threads(2, save):
        assert isinstance(error, UnsupportedError)
        assert "embedding.word_embeddings.weight" in str(error)
        assert "linear_qkv" not in str(error)
    assert not (tmp_path / "run").exists()
