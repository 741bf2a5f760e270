"""`ucp.save`: what is in the store, what is refused, and what a save that fails leaves."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ucp
import ucp.saving.save
from tests.unit.live.threads import ThreadRanks
from tests.unit.live.threads import run as run_threads
from ucp.contract.layouts import chunk_axis
from ucp.core.index import Kind
from ucp.core.layout import Layout
from ucp.errors import (
    DestinationError,
    MalformedError,
    MissingFileError,
    ReplicaError,
    UcpError,
    UnsupportedError,
    UsageError,
)
from ucp.live.parts import LivePart
from ucp.saving.commit import begin, commit, growing_folder, merge_facts
from ucp.saving.holdings import RankFacts, _describe_state


class Tied(nn.Module):
    """Parameters of every kind: trained, frozen, tied, 0-d, without elements; buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.norm(self.emb(tokens)) * self.scale)
        return hidden


def make_run(seed: int, *, steps: int = 0) -> tuple[Tied, torch.optim.AdamW, torch.optim.lr_scheduler.StepLR]:
    torch.manual_seed(seed)
    model = Tied()
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": trained[:1]}, {"params": trained[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1 if steps else 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(steps):
        model(torch.randint(6, (5,))).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def test_a_run_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    model, optimizer, scheduler = make_run(0, steps=3)
    report = ucp.save(model, optimizer, None, tmp_path / "run", scheduler=scheduler, extras={"seen": (1, 2)})
    following = random.random(), np.random.rand(), torch.rand(1).item()
    assert report.step == 3
    assert "saved    " in str(report)
    assert report.as_dict()["nbytes_total"] == report.nbytes_written
    index = ucp.inspect(tmp_path / "run")
    assert index.aliases == {"head.weight": "emb.weight"}
    assert index.atoms["frozen"].kind is Kind.FROZEN
    assert index.atoms["norm.running_mean"].kind is Kind.BUFFER
    assert index.atoms["empty"].states["weight"].global_shape == (0, 4)
    assert ucp.verify(tmp_path / "run").ok
    again, again_optimizer, again_scheduler = make_run(1)
    ucp.load_into(
        again,
        None,
        tmp_path / "run",
        optimizer=again_optimizer,
        scheduler=again_scheduler,
        rank_extras="carry",
        verify=True,
    )
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == following
    assert ucp.open(tmp_path / "run").extra("seen") == (1, 2)
    assert again_scheduler.state_dict() == scheduler.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    for param, again_param in zip(model.parameters(), again.parameters(), strict=True):
        states, again_states = optimizer.state.get(param, {}), again_optimizer.state.get(again_param, {})
        assert {name: value.tolist() for name, value in states.items()} == {
            name: value.tolist() for name, value in again_states.items()
        }
    for group, again_group in zip(optimizer.param_groups, again_optimizer.param_groups, strict=True):
        assert (group["lr"], group["weight_decay"]) == (again_group["lr"], again_group["weight_decay"])


@pytest.mark.parametrize("step", ["3", 1.5, float("nan"), True, -1, 1 << 63])
def test_a_step_is_a_whole_number(step: object, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError):
        ucp.save(model, False, "dp=1", tmp_path / "run", step=step)  # type: ignore[call-overload]
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError):
        ucp.Snapshots().take(model, False, "dp=1", step=step)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)])
def test_a_step_of_numpy_or_torch_is_read_again(step: object, tmp_path: Path) -> None:
    ucp.save(nn.Linear(2, 2), False, "dp=1", tmp_path / "run", step=step)  # type: ignore[call-overload]
    assert ucp.open(tmp_path / "run").index.step == 3


def test_replicas_write_each_tensor_once(tmp_path: Path) -> None:
    runs = [make_run(0, steps=1) for _ in range(3)]

    def save(ranks: ThreadRanks) -> ucp.SaveReport:
        model, optimizer, _ = runs[ranks.rank]
        return ucp.save(model, optimizer, "dp=3", tmp_path / "run", process_group=ranks)

    reports = run_threads(3, save)
    written = [report.nbytes_written for report in reports if isinstance(report, ucp.SaveReport)]
    assert sum(written) == sum(path.nbytes for path in _tensors(tmp_path / "run"))
    assert len(written) == 3
    assert min(written) > 0
    assert ucp.verify(tmp_path / "run").ok


def _tensors(path: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return [tensor for pack in sorted((path / "packs").iterdir()) for tensor in load_file(pack).values()]


def test_masters_are_saved_in_place_of_weights(tmp_path: Path) -> None:
    model = nn.Linear(2, 3, dtype=torch.bfloat16)
    masters = {name: param.detach().float() + 1e-6 for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(list(masters.values()), lr=0.1)
    ucp.save(model, optimizer, None, tmp_path / "run", masters=masters, step=7)
    checkpoint = ucp.open(tmp_path / "run")
    assert checkpoint.step == 7
    assert checkpoint.index.atoms["weight"].model_dtype == "bfloat16"
    assert torch.equal(checkpoint.read("weight"), masters["weight"])


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(DestinationError):
        ucp.save(nn.Linear(2, 2), None, None, tmp_path / "run")
    (tmp_path / "other.ucp-partial" / "mine").mkdir(parents=True)  # which no save has begun
    with pytest.raises(DestinationError):
        ucp.save(nn.Linear(2, 2), None, None, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.ucp-partial", "run"]


def test_a_save_that_fails_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr("ucp.saving.part.write_at", fail)
        with pytest.raises(OSError, match=str(errno.ENOSPC)):
            ucp.save(nn.Linear(2, 2), None, None, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UcpError):
        ucp.open(growing_folder(tmp_path / "run"))
    ucp.save(nn.Linear(2, 2), None, None, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_bytes_after_the_end_of_a_pack_are_refused(tmp_path: Path) -> None:
    ucp.save(nn.Linear(2, 2), None, None, tmp_path / "run")
    with (tmp_path / "run/packs/00000.safetensors").open("ab") as pack:
        pack.write(b"x")
    with pytest.raises(MalformedError):
        ucp.open(tmp_path / "run")


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    run = merge_facts([RankFacts(atoms={}, groups=(), items=())], topology=ucp.Topology(), step=None, origin="torch")
    with pytest.raises(MissingFileError, match="0, 1"):
        commit(tmp_path / "run", run, 2)


def test_ranks_that_contradict_one_another_are_refused(tmp_path: Path) -> None:
    def save(ranks: ThreadRanks) -> ucp.SaveReport:
        return ucp.save(nn.Linear(2 + ranks.rank, 2), None, None, tmp_path / "run", process_group=ranks)

    for error in run_threads(2, save):
        assert isinstance(error, ReplicaError)
        assert "weight" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    """As those of stages whose topology was not passed."""

    def save(ranks: ThreadRanks) -> ucp.SaveReport:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, ranks.rank)
        nn.init.zeros_(model.bias)
        return ucp.save(model, None, None, tmp_path / "run", process_group=ranks)

    for error in run_threads(2, save):
        assert isinstance(error, ReplicaError)
        assert "weight" in str(error)
        assert "bias" not in str(error)
    with pytest.raises(UnsupportedError):
        ucp.save(nn.Linear(2, 2, device="meta"), None, None, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    def save(ranks: ThreadRanks) -> ucp.SaveReport:
        return ucp.save(nn.Linear(2, 2), None, "tp=2", tmp_path / "run", process_group=ranks)

    assert all(isinstance(error, UnsupportedError) for error in run_threads(2, save))
    with pytest.raises(UsageError):
        ucp.save(nn.Linear(2, 2), None, None, "s3://bucket/run")
    with pytest.raises(UsageError):
        ucp.save(nn.Linear(2, 2), None, None, tmp_path / "run", scheduler=3)
    with pytest.raises(UsageError):
        ucp.save(nn.Linear(2, 2), None, None, tmp_path / "run", extras={"rng_state": 1})


def test_stages_and_experts_get_their_names_in_the_whole_model(tmp_path: Path) -> None:
    def save(ranks: ThreadRanks) -> ucp.SaveReport:
        stage = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])})
        for number, layer in enumerate(stage["layers"]):
            nn.init.constant_(layer.weight, 10 * ranks.rank + number)
        return ucp.save(stage, None, "pp=2", tmp_path / "run", process_group=ranks)

    run_threads(2, save)
    checkpoint = ucp.open(tmp_path / "run")
    assert [checkpoint.read(f"layers.{n}.weight")[0, 0].item() for n in range(4)] == [0, 1, 10, 11]


def test_a_range_of_one_element_is_no_count() -> None:
    """As ZeRO leaves one at the border of two ranks; a count of the optimizer has no dims, or is `step`."""
    part = LivePart(local_shape=(2, 2), layout=Layout(flat=(chunk_axis(4),)), coords={chunk_axis(4).axis: 3})
    held = _describe_state("w/exp_avg", torch.ones(1), part, (2, 2))
    assert held.tensor is not None
    assert [str(placed.box) for placed in held.boxes] == ["[1:2, 1:2]"]
    for label, value in (("w/step", torch.ones(1)), ("w/mu_product", torch.tensor(1.0))):
        assert _describe_state(label, value, part, (2, 2)).facts.value is not None


def test_a_failed_removal_of_links_says_that_the_save_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EACCES, "not yours")

    ucp.save(nn.Linear(2, 2), None, None, tmp_path / "step1", step=1, chain=True)
    monkeypatch.setattr("ucp.saving.job.collect_links", fail)
    with pytest.raises(DestinationError, match="step2"):
        ucp.save(nn.Linear(2, 2), None, None, tmp_path / "step2", step=2, chain=True, keep=1)
    assert ucp.open(tmp_path).step == 2
