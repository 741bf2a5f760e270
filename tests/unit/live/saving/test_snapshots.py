"""Two-level saves: what stays in memory, what is written, and what is recovered after a failure."""

from __future__ import annotations

import json
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import ucp
from tests.unit.live.saving.test_chain import EXPERTS, make_moe
from tests.unit.live.threads import ThreadRanks
from tests.unit.live.threads import run as run_threads
from ucp.errors import LoadError, StaleError, UsageError
from ucp.saving.part import write_part

TOPOLOGY = "dp=2,ep=2"


def make_part(rank: int, step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A rank's router and two of four experts, whose weights tell expert and step; each has taken a step."""
    model = make_moe(step, EXPERTS // 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for number, expert in enumerate(model["moe"]["experts"]):
        nn.init.constant_(expert.weight, 100 * (2 * rank + number) + step)
    nn.init.constant_(model["moe"]["router"].weight, step)
    return model, optimizer


def save(chain: Path, step: int, ranks: ThreadRanks, snapshots: ucp.Snapshots) -> ucp.SaveHandle:
    model, optimizer = make_part(ranks.rank, step)
    plan = ucp.PartialExperts(2, written=1) if step else ucp.Full()
    options = {"step": step, "plan": plan, "chain": True, "process_group": ranks, "snapshots": snapshots}
    return ucp.save(model, optimizer, TOPOLOGY, chain / f"step{step}", asynchronous=True, **options)


def load(chain: Path, ranks: ThreadRanks, snapshots: ucp.Snapshots, **options: object) -> tuple[list[float], list[str]]:
    """Weights of the router and of the rank's experts, and the notes."""
    model, optimizer = make_part(ranks.rank, 99)
    report = ucp.load_into(
        model, TOPOLOGY, chain, optimizer=optimizer, process_group=ranks, snapshots=snapshots, **options
    )
    assert report.step == json.loads((chain / "chain.json").read_text())["links"][-1]["iteration"]
    params = [model["moe"]["router"].weight, *(expert.weight for expert in model["moe"]["experts"])]
    return [param[0, 0].item() for param in params], list(report.notes)


def test_survivors_recover_newer_experts_beside_the_rest_of_the_last_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, memories = threading.Event(), [ucp.Snapshots(), ucp.Snapshots()]
    handles: list[ucp.SaveHandle] = []

    def write_later(root: Path, *arguments: object) -> int:
        if root.name.startswith("step4"):
            may_write.wait(60)
        return write_part(root, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("ucp.saving.job.write_part", write_later)

    def train(ranks: ThreadRanks) -> None:
        for step in range(4):
            save(tmp_path, step, ranks, memories[ranks.rank]).wait()
        handle = save(tmp_path, 4, ranks, memories[ranks.rank])
        handles.append(handle)
        assert save(tmp_path, 5, ranks, memories[ranks.rank]) is handle  # in memory alone
        assert memories[ranks.rank].step == 5

    assert run_threads(2, train) == [None, None]
    stored = {name: ucp.open(tmp_path)[name].index.iteration for name in ucp.open(tmp_path)}
    assert list(stored.values()).count(None) == 2  # the router, and the one expert of the newest link
    memories[1] = ucp.Snapshots()  # of a new process

    def recover(ranks: ThreadRanks) -> tuple[list[float], list[str]]:
        return load(tmp_path, ranks, memories[ranks.rank])

    found = run_threads(2, recover)
    expected_from_memory = [
        param for param in memories[0]._snapshots[-1].facts.atoms if "experts" in param
    ]  # of both ranks
    for rank, (values, notes) in enumerate(found):
        assert values[0] == 3  # of the newest link
        for number in range(2):
            expert = 2 * rank + number
            name = f"moe.experts.{expert}.weight"
            iteration = 3 if stored[name] is None else stored[name]
            survives = rank == 0 and name in expected_from_memory
            assert values[1 + number] == 100 * expert + (5 if survives else iteration)
        assert any("iteration 5" in note and "iteration 3" in note for note in notes)
    refused = run_threads(2, lambda ranks: load(tmp_path, ranks, memories[ranks.rank], exact=True))
    assert all(isinstance(error, StaleError) for error in refused)
    may_write.set()
    for handle in handles:
        handle._thread.join()

    def go_on(ranks: ThreadRanks) -> int:
        save(tmp_path, 6, ranks, memories[ranks.rank]).wait()
        return memories[ranks.rank].turn

    loaded = [weakref.ref(holding.tensor) for holding in memories[0]._snapshots[-1].tensors.values()]
    assert run_threads(2, go_on) == [7, 7]  # the new rank takes the turn of rank 0
    assert not any(tensor() is not None for tensor in loaded)


def test_a_snapshot_without_the_optimizer_is_named_as_what_lacks_its_states(tmp_path: Path) -> None:
    model, optimizer = make_part(0, 1)
    ucp.save(model, optimizer, None, tmp_path / "step1", step=1, chain=True)
    snapshots = ucp.Snapshots()
    snapshots.take(model, None, None, step=2)
    with pytest.raises(LoadError) as caught:
        ucp.load_into(model, None, tmp_path, optimizer=optimizer, snapshots=snapshots)
    assert "Snapshots.take" in str(caught.value)
    assert ucp.load_into(model, None, tmp_path, snapshots=snapshots).step == 2


def test_every_expert_is_written_in_turn(tmp_path: Path) -> None:
    memories = [ucp.Snapshots(), ucp.Snapshots()]

    def train(ranks: ThreadRanks) -> None:
        for step in range(5):
            save(tmp_path, step, ranks, memories[ranks.rank]).wait()

    assert run_threads(2, train) == [None, None]
    checkpoint = ucp.open(tmp_path)
    written = [checkpoint.read(f"moe.experts.{n}.weight")[0, 0].item() % 100 for n in range(EXPERTS)]
    assert sorted(written) == [1, 2, 3, 4]
    names = [[atom for atom in ucp.open(tmp_path / f"step{step}") if "experts" in atom] for step in range(1, 5)]
    assert [len(of_link) for of_link in names] == [1, 1, 1, 1]
    for rank, memory in enumerate(memories):
        kept = {item.param for item in memory._snapshots[-1].tensors if "experts" in item.param}
        assert all(int(name.split(".")[2]) // 2 == rank for name in kept)
    assert sum(len({item.param for item in m._snapshots[-1].tensors if "experts" in item.param}) for m in memories) == 2


def test_snapshots_need_background_saves_into_a_chain(tmp_path: Path) -> None:
    for options in ({"asynchronous": True}, {"chain": True}):
        with pytest.raises(UsageError):
            ucp.save(make_moe(0), None, None, tmp_path / "run", step=0, snapshots=ucp.Snapshots(), **options)
    assert not (tmp_path / "run").exists()

    def save_unlike(ranks: ThreadRanks) -> ucp.SaveReport:
        snapshots = None if ranks.rank else ucp.Snapshots()
        return ucp.save(make_moe(0), None, None, tmp_path / "run", process_group=ranks, snapshots=snapshots)

    assert all(isinstance(error, UsageError) for error in run_threads(2, save_unlike))
