"""Saves into a chain: its links, and what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ucp
from tests.unit.live.threads import ThreadRanks
from tests.unit.live.threads import run as run_threads
from ucp.errors import DestinationError, MalformedError, UsageError
from ucp.saving.job import SaveJob


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


def test_a_link_that_another_process_adds_during_a_save_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "chain", 10)
    other = ucp.save(make_model(15), None, None, tmp_path / "other", step=15).path
    write = SaveJob.write

    def add_meanwhile(job: SaveJob) -> None:
        ucp.add_to_chain(tmp_path / "chain", [other])
        write(job)

    monkeypatch.setattr(SaveJob, "write", add_meanwhile)
    save(tmp_path / "chain", 20)
    links = json.loads((tmp_path / "chain" / "chain.json").read_text())["links"]
    assert [link["iteration"] for link in links] == [10, 15, 20]


def test_two_processes_do_not_save_to_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "import sys, torch, ucp; ucp.save(torch.nn.Linear(2, 2), None, None, sys.argv[1], step=1)"
    command = [sys.executable, "-c", other, str(tmp_path / "store")]
    write, results = SaveJob.write, []

    def save_meanwhile(job: SaveJob) -> None:
        results.append(subprocess.run(command, capture_output=True, text=True, check=False))
        write(job)

    monkeypatch.setattr(SaveJob, "write", save_meanwhile)
    ucp.save(make_model(3), None, None, tmp_path / "store", step=1)
    assert "BusyError" in results[0].stderr
    assert ucp.open(tmp_path / "store").read("weight")[0, 0].item() == 3
    assert ucp.verify(tmp_path / "store").ok


def test_links_that_are_exchanged_are_refused(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    for a, b in ((10, 0), (20, 10), (0, 20)):
        (tmp_path / f"step{a}").rename(tmp_path / f"step{b}")
    with pytest.raises(MalformedError, match=r"step\d0"):
        ucp.open(tmp_path)


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


def kill_everywhere(chain: Path, action: Callable[[], object], *, least: int) -> Iterator[bool]:
    """Act on the chain, killed at its first change, its second, and so on, each time from the start; whether killed."""
    start = chain.with_name("start")
    shutil.copytree(chain, start)
    for number in range(200):
        shutil.rmtree(chain)
        shutil.copytree(start, chain)
        with pytest.MonkeyPatch.context() as patched:
            changes = kill_at(number, patched)
            with suppress(KilledError):
                action()
            total = changes()
        yield total > number
        if total <= number:
            break
    assert least < total < 200


def test_a_kill_at_any_change_leaves_the_chain_at_a_link(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    save(chain, 10)
    for is_killed in kill_everywhere(chain, lambda: save(chain, 20), least=15):
        value = 10 if is_killed else 20
        checkpoint = ucp.open(chain)
        assert checkpoint.step in (value, 20)
        assert torch.all(checkpoint.read("weight") == checkpoint.step)
        assert ucp.verify(chain).ok
        if checkpoint.step == 10:
            save(chain, 20)  # whatever is left
            assert ucp.open(chain).step == 20


EXPERTS = 4


def make_moe(value: float, experts: int = EXPERTS) -> nn.Module:
    layer = nn.ModuleDict({"router": nn.Linear(2, EXPERTS, bias=False)})
    layer["experts"] = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(experts))
    model = nn.ModuleDict({"moe": layer})
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def test_a_chain_of_some_experts_is_read_as_the_newest_of_each(tmp_path: Path) -> None:
    model = make_moe(0)
    optimizer = torch.optim.AdamW(
        [{"params": model["moe"]["router"].parameters()}, {"params": model["moe"]["experts"].parameters()}]
    )
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for step in range(4):
        for param in model.parameters():
            nn.init.constant_(param, step)
        plan = ucp.PartialExperts(1) if step else ucp.Full()
        ucp.save(model, optimizer, None, tmp_path / f"step{step}", step=step, plan=plan, chain=True)
    checkpoint = ucp.open(tmp_path)
    names = ["moe.router.weight", *(f"moe.experts.{expert}.weight" for expert in range(EXPERTS))]
    assert [checkpoint.read(name)[0, 0].item() for name in names] == [3, 1, 2, 3, 0]
    again = make_moe(9)
    groups = [{"params": again["moe"]["router"].parameters()}, {"params": again["moe"]["experts"].parameters()}]
    ucp.load_into(again, None, tmp_path, optimizer=torch.optim.AdamW(groups))
    assert again["moe"]["experts"][1].weight[0, 0].item() == 2


def test_some_experts_need_a_full_first_link(tmp_path: Path) -> None:
    plan = ucp.PartialExperts(1)
    for chain in (False, True):
        with pytest.raises(UsageError):
            ucp.save(make_moe(0), None, None, tmp_path / "step1", step=1, plan=plan, chain=chain)
    save(tmp_path, 1)  # of another model
    with pytest.raises(UsageError):
        ucp.save(make_moe(0), None, None, tmp_path / "step2", step=2, plan=plan, chain=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chain.json", "step1"]


def test_expert_parallel_ranks_save_experts_in_turn(tmp_path: Path) -> None:
    def save_all(ranks: ThreadRanks) -> list[int]:
        written = []
        for step in range(3):
            model = make_moe(step, EXPERTS // 2)  # each rank numbers its experts from 0
            nn.init.constant_(model["moe"]["router"].weight, 100 + step)
            nn.init.constant_(model["moe"]["experts"][0].weight, 10 * ranks.rank + step)
            plan = ucp.PartialExperts(2) if step else ucp.Full()
            path = tmp_path / f"step{step}"
            report = ucp.save(model, None, "dp=2,ep=2", path, step=step, plan=plan, chain=True, process_group=ranks)
            written.append(report.nbytes_written)
        return written

    first, second = run_threads(2, save_all)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first[1] + second[1] == 4 * (EXPERTS * 2 + 2 * 4)  # the router, and two experts of four
    assert abs(first[1] - second[1]) == 4 * EXPERTS * 2  # an expert each, and the router
    checkpoint = ucp.open(tmp_path)
    assert checkpoint.read("moe.router.weight")[0, 0].item() == 102
    assert [checkpoint.read(f"moe.experts.{n}.weight")[0, 0].item() for n in range(EXPERTS)] == [1, 2, 11, 2]


def save_experts(chain: Path, step: int, keep: int | None = None, *, k: int = 1, full: bool = False) -> None:
    plan = ucp.Full() if full else ucp.PartialExperts(k)
    ucp.save(make_moe(step), None, None, chain / f"step{step}", step=step, plan=plan, chain=True, keep=keep)


def steps_of(chain: Path) -> list[int]:
    """Listed links, which are the folders that are there."""
    steps = [link["iteration"] for link in json.loads((chain / "chain.json").read_text())["links"]]
    folders = {path.name for path in chain.iterdir()}
    assert folders == {"chain.json", *(f"step{step}" for step in steps)}
    return steps


def test_links_that_no_restore_point_needs_are_removed(tmp_path: Path) -> None:
    for step in range(6):
        ucp.save(make_model(step), None, None, tmp_path / f"step{step}", step=step, chain=True, keep=2)
    assert steps_of(tmp_path) == [4, 5]
    assert ucp.open(tmp_path, at=4).read("weight")[0, 0].item() == 4
    for keep, chain in ((0, True), (1, False), (True, True)):
        with pytest.raises(UsageError):
            ucp.save(make_model(9), None, None, tmp_path / "step9", step=9, chain=chain, keep=keep)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_links_of_some_experts_stay_as_long_as_one_needs_them(keep: int, tmp_path: Path) -> None:
    """The full link goes once four links hold an expert each; then each new one replaces the oldest."""
    save_experts(tmp_path, 0, full=True)
    for step in range(1, 12):
        save_experts(tmp_path, step, keep)
        oldest = max(step - keep + 1, 0)
        first = 0 if oldest < EXPERTS else oldest - EXPERTS + 1
        assert steps_of(tmp_path) == list(range(first, step + 1))
        for at in range(oldest, step + 1):  # every kept point reads as if nothing had been removed
            checkpoint = ucp.open(tmp_path, at=at)
            read = [checkpoint.read(f"moe.experts.{n}.weight")[0, 0].item() for n in range(EXPERTS)]
            assert sorted(read) == [max(at - n, 0) for n in reversed(range(EXPERTS))]
            assert checkpoint.read("moe.router.weight")[0, 0].item() == at
        if first:
            with pytest.raises(UsageError):
                ucp.open(tmp_path, at=oldest - 1)


def test_a_link_that_no_save_wrote_stays(tmp_path: Path) -> None:
    save(tmp_path / "chain", 1)
    ucp.convert(tmp_path / "chain" / "step1", tmp_path / "chain" / "step2", to="ucp")
    ucp.convert(tmp_path / "chain" / "step1", tmp_path / "elsewhere", to="ucp")
    links = [{"path": "step2", "iteration": 1}, {"path": str(tmp_path / "elsewhere"), "iteration": 2}]
    (tmp_path / "chain" / "chain.json").write_text(json.dumps({"version": 1, "links": links[:1]}))
    ucp.save(make_model(5), None, None, tmp_path / "chain" / "step5", step=5, chain=True, keep=1)
    listed = json.loads((tmp_path / "chain" / "chain.json").read_text())["links"]
    assert [link["path"] for link in listed] == ["step2", "step5"]
    assert (tmp_path / "chain" / "step1").is_dir()  # which is not listed


def test_a_kill_while_links_are_removed_leaves_what_the_points_need(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    save_experts(chain, 0, full=True)
    for step in range(1, 5):
        save_experts(chain, step)
    for _ in kill_everywhere(chain, lambda: save_experts(chain, 5, 1), least=20):
        checkpoint = ucp.open(chain)
        step = checkpoint.step
        assert step in (4, 5)
        read = [checkpoint.read(f"moe.experts.{n}.weight")[0, 0].item() for n in range(EXPERTS)]
        assert sorted(read) == list(range(step - 3, step + 1))
    assert steps_of(chain) == [2, 3, 4, 5]


def test_windows_stay_whole(tmp_path: Path) -> None:
    operators = ("moe.router", *(f"moe.experts.{n}" for n in range(EXPERTS)))
    plan = ucp.SparseWindow((operators[:2], operators[2:4], operators[4:]))
    for step in range(1, 9):
        path, extras = tmp_path / f"step{step}", {"clip_norm": None}
        ucp.save(make_moe(step), None, None, path, step=step, plan=plan, chain=True, extras=extras, keep=1)
    assert steps_of(tmp_path) == [4, 5, 6, 7, 8]  # a whole window, and the one that is being saved


LAYOUTS = st.sampled_from(["dp=1", "dp=2", "dp=2,ep=2", "dp=4,ep=2", "dp=4,ep=4"])


def count_ranks(topology: str) -> int:
    return int(topology.partition(",")[0].removeprefix("dp="))


def make_rank_model(topology: str, rank: int) -> nn.Module:
    """This rank's experts, numbered from 0, and the router; no two tensors are alike."""
    ep = int(topology.partition("ep=")[2] or 1)
    local = EXPERTS // ep
    model = make_moe(0, local)
    nn.init.constant_(model["moe"]["router"].weight, 100)
    for number, expert in enumerate(model["moe"]["experts"]):
        nn.init.constant_(expert.weight, rank % ep * local + number)
    return model


@settings(max_examples=6, deadline=None)
@given(saved=LAYOUTS, loaded=LAYOUTS)
def test_what_is_saved_at_one_topology_is_loaded_at_another(
    tmp_path_factory: pytest.TempPathFactory, saved: str, loaded: str
) -> None:
    path = tmp_path_factory.mktemp("run") / "step1"

    def save_all(ranks: ThreadRanks) -> None:
        ucp.save(make_rank_model(saved, ranks.rank), None, saved, path, step=1, process_group=ranks)

    def load_all(ranks: ThreadRanks) -> bool:
        expected = make_rank_model(loaded, ranks.rank).state_dict()
        model = make_rank_model(loaded, ranks.rank)
        for param in model.parameters():
            nn.init.constant_(param, -1)
        ucp.load_into(model, loaded, path, process_group=ranks)
        return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())

    assert run_threads(count_ranks(saved), save_all) == [None] * count_ranks(saved)
    assert run_threads(count_ranks(loaded), load_all) == [True] * count_ranks(loaded)
