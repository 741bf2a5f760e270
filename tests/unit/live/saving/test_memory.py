"""Loads from the memory of ranks that are left: what comes from which rank, at which step, and what from storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ucp
from tests.unit.live.cluster import Place, Saved, Sizes, local, module
from tests.unit.live.threads import ThreadRanks
from tests.unit.live.threads import run as run_threads
from ucp.core.index import Fragment, StateIndex
from ucp.core.region import Box
from ucp.core.target import full_slice
from ucp.core.tensor import DType, TensorRef
from ucp.errors import StaleError, UsageError
from ucp.live.exchange.carry import CarryOptions
from ucp.live.exchange.memory import carry_with_memory
from ucp.live.parts import LoadItem, memory_path

EXPERTS, WIDTH = 6, 4
BYTES = 3 * WIDTH * WIDTH * 4
"""Of an expert: its weight and two moments."""


def make_model(experts: list[int], step: int, *, scale: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A layer with these experts; every number says to which parameter and step it belongs."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict()])})
    model["layers"][0]["router"] = nn.Linear(WIDTH, EXPERTS, bias=False)
    model["layers"][0]["experts"] = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1 / (step + 1))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    params = [*zip(experts, model["layers"][0]["experts"].parameters(), strict=True)]
    for expert, param in [(EXPERTS, model["layers"][0]["router"].weight), *params]:
        nn.init.constant_(param, scale * (100 * expert + step))
        optimizer.state[param]["step"].fill_(step)
        for number, state in enumerate(("exp_avg", "exp_avg_sq")):
            optimizer.state[param][state].fill_(scale * (10000 * (number + 1) + 100 * expert + step))
    return model, optimizer


def read_steps(model: nn.Module, optimizer: torch.optim.Optimizer, experts: list[int]) -> dict[int, int]:
    """Expert (`EXPERTS`: the router) to the step that its weight and states are of."""
    steps = {}
    params = [*zip(experts, model["layers"][0]["experts"].parameters(), strict=True)]
    for expert, param in [(EXPERTS, model["layers"][0]["router"].weight), *params]:
        state = optimizer.state[param]
        found = {int(param[0, 0].item()) - 100 * expert, int(state["step"].item())}
        found |= {int(state["exp_avg"][0, 0].item()) - 10000 - 100 * expert}
        found |= {int(state["exp_avg_sq"][-1, -1].item()) - 20000 - 100 * expert}
        (steps[expert],) = found
        assert bool((param == param[0, 0]).all())
    return steps


def placement_of(slots: list[list[int]]) -> dict[int, dict[int, list[int]]]:
    """The experts of each rank, in increasing order, as `load_into` takes them."""
    ranks: dict[int, list[int]] = {}
    for rank, experts in enumerate(slots):
        for expert in experts:
            ranks.setdefault(expert, []).append(rank)
    return {0: dict(sorted(ranks.items()))}


SIX = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [0, 5]]


def train(
    folder: Path,
    memories: list[ucp.Snapshots],
    steps: list[list[int]],
    *,
    slots: list[list[int]] = SIX,
    placement: object = None,
) -> None:
    """Six ranks save step 2, and take snapshots of the steps of each. `placement`: that of `slots`, if it is one."""
    placement = placement or placement_of(slots)

    def work(ranks: ThreadRanks) -> None:
        topology = "dp=6,ep=6"
        model, optimizer = make_model(slots[ranks.rank], 2)
        ucp.save(model, optimizer, topology, folder / "step2", step=2, chain=True, placement=placement,
                 process_group=ranks)  # fmt: skip
        for step in range(3, 6):
            model, optimizer = make_model(slots[ranks.rank], step)
            if step in steps[ranks.rank]:  # a rank that is killed, or whose peer is, takes none
                memories[ranks.rank].take(
                    model, optimizer, topology, step=step, placement=placement, process_group=Alone(ranks)
                )

    assert run_threads(6, work) == [None] * 6


class Alone:
    """A rank that takes a snapshot without the others, as if all had answered what it says itself."""

    def __init__(self, ranks: ThreadRanks) -> None:
        self.rank, self.count, self.device = ranks.rank, ranks.count, ranks.device

    def share(self, value: object) -> list[object]:
        return [value] * self.count

    def swap(self, parts: object) -> None: ...

    def gather(self, *parts: object) -> None: ...


def load(
    folder: Path,
    memories: list[ucp.Snapshots],
    slots: list[list[int]],
    *,
    placement: object = None,
    **options: object,
) -> list[tuple[dict[int, int], ucp.LoadReport] | Exception]:
    """Steps of what each rank has after a load of all ranks, and its report."""

    def work(ranks: ThreadRanks) -> tuple[dict[int, int], ucp.LoadReport]:
        model, optimizer = make_model(slots[ranks.rank], 99)
        count = len(slots)
        report = ucp.load_into(
            model, f"dp={count},ep={count}", folder, optimizer=optimizer, placement=placement or placement_of(slots),
            snapshots=memories[ranks.rank], process_group=ranks, **options,
        )  # fmt: skip
        assert {group["lr"] for group in optimizer.param_groups} == {1 / (report.step + 1)}
        return read_steps(model, optimizer, slots[ranks.rank]), report

    return run_threads(len(slots), work)


def test_all_is_from_survivors_at_the_newest_step_that_all_have(tmp_path: Path) -> None:
    memories = [ucp.Snapshots() for _ in range(6)]
    train(tmp_path, memories, [[3, 4], [3, 4, 5], [3, 4, 5], [3, 4], [3, 4, 5], [3, 4]])
    left = [0, 1, 3, 4]  # 2 and 5 are lost: every expert is left
    slots = [[0, 1, 2], [1, 2, 5], [0, 3, 4], [3, 4, 5]]
    results = load(tmp_path, [memories[rank] for rank in left], slots, verify=True)
    for rank, (steps, report) in zip(left, results, strict=True):
        new = slots[left.index(rank)]
        assert steps == dict.fromkeys([*new, EXPERTS], 4)
        assert report.step == 4
        assert (report.nbytes_total, report.nbytes_wanted) == (0, 0)
        assert report.nbytes_exchanged == BYTES * len(set(new) - set(SIX[rank]))
        assert report.nbytes_memory == BYTES * (len(new) + EXPERTS / WIDTH)
        assert report.unchecked == ()
    assert all(
        not isinstance(result, Exception)
        for result in load(tmp_path, [memories[rank] for rank in left], slots, exact=True)
    )


def test_only_an_expert_that_no_rank_has_is_read_from_storage(tmp_path: Path) -> None:
    memories = [ucp.Snapshots() for _ in range(6)]
    train(tmp_path, memories, [[3, 4, 5]] * 6)
    left = [0, 1, 4, 5]  # expert 3 was on 2 and 3
    slots = [[0, 1, 3], [1, 2, 3], [2, 4, 5], [0, 4, 5]]
    results = load(tmp_path, [memories[rank] for rank in left], slots)
    for rank, (steps, report) in enumerate(results):
        assert steps == {**dict.fromkeys([*slots[rank], EXPERTS], 5), **({3: 2} if 3 in slots[rank] else {})}
        assert report.nbytes_wanted == report.nbytes_total == 2 * BYTES  # two ranks have it now
        assert any("iteration 5" in note and "iteration 2" in note for note in report.notes)
    refused = load(tmp_path, [memories[rank] for rank in left], slots, exact=True)
    assert all(isinstance(error, StaleError) for error in refused)


def test_what_moves_is_what_was_predicted(tmp_path: Path) -> None:
    loads = [[9, 1, 2, 3, 1, 4]]
    before = ucp.place(loads, nodes=6, slots=3, threshold=3)
    after = ucp.place([[1, 5, 1, 5, 1, 1]], nodes=4, slots=4)
    memories = [ucp.Snapshots() for _ in range(6)]
    slots_before = [list(experts) for experts in before.experts_by_gpu(0)]
    train(tmp_path, memories, [[5]] * 6, placement=before, slots=slots_before)
    lost = [1, 4]
    migration = ucp.migrate(before, after, lost=lost, checkpoint=tmp_path)
    left = [rank for rank in range(6) if rank not in lost]
    assert list(migration.nodes) == left
    assert migration.nbytes_per_expert == {0: BYTES + 4}  # with the step count
    slots = [list(experts) for experts in migration.placement.experts_by_gpu(0)]
    results = load(tmp_path, [memories[rank] for rank in left], slots, placement=migration.placement)
    for node, (steps, report) in enumerate(results):
        assert migration.transfers
        received = [transfer for transfer in migration.transfers if transfer.node == node]
        assert all(transfer.source is not None for transfer in received)
        assert report.nbytes_exchanged == BYTES * len(received)
        assert report.nbytes_total == 0
        assert set(steps.values()) == {5}
    assert sum(report.nbytes_exchanged for _, report in results) > 0


def test_experts_that_are_rows_of_one_tensor_move(tmp_path: Path) -> None:
    def make(experts: list[int], step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": nn.Module()})])})
        rows = torch.tensor(experts).float().mul(100).add(step)[:, None, None].expand(-1, WIDTH, WIDTH)
        model["layers"][0]["experts"].w1 = nn.Parameter(rows.clone())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        (param,) = model.parameters()
        param.grad = rows.clone()
        optimizer.step()
        return model, optimizer

    all_experts = make([*range(EXPERTS)], 2)
    ucp.save(*all_experts, None, tmp_path / "step2", step=2)
    memories = [ucp.Snapshots() for _ in range(6)]
    slots = [[0, 2, 5], [1, 3, 5], [2, 3, 4], [0, 1, 4]]

    def take(ranks: ThreadRanks) -> None:
        memories[ranks.rank].take(
            *make(SIX[ranks.rank], 7), "dp=6,ep=6", step=7, like=tmp_path / "step2", placement=placement_of(SIX),
            process_group=ranks,
        )  # fmt: skip

    def go_on(ranks: ThreadRanks) -> tuple[list[float], list[float], ucp.LoadReport]:
        model, optimizer = make(slots[ranks.rank], 99)
        report = ucp.load_into(
            model, "dp=4,ep=4", tmp_path / "step2", optimizer=optimizer, placement=placement_of(slots),
            snapshots=memories[[0, 1, 3, 4][ranks.rank]], process_group=ranks,
        )  # fmt: skip
        (param,) = model.parameters()
        average = optimizer.state[param]["exp_avg"]
        return param[:, 0, -1].tolist(), (average[:, -1, 0] / average[0, 0, 0]).tolist(), report

    assert run_threads(6, take) == [None] * 6
    results = run_threads(4, go_on)
    assert not isinstance(results[0], Exception), str(results[0])
    for rank, (weights, averages, report) in enumerate(results):
        expected = [100.0 * expert + 7 for expert in slots[rank]]
        assert weights == expected
        assert averages == pytest.approx([value / expected[0] for value in expected])
        assert report.nbytes_total == 0
        new = set(slots[rank]) - set(SIX[[0, 1, 3, 4][rank]])
        assert report.nbytes_exchanged == BYTES * len(new)


def test_a_new_process_gets_all_from_the_others(tmp_path: Path) -> None:
    memories = [ucp.Snapshots() for _ in range(6)]
    train(tmp_path, memories, [[4, 5]] * 6)
    memories[2] = ucp.Snapshots()
    for rank, (steps, report) in enumerate(load(tmp_path, memories, SIX)):
        assert steps == dict.fromkeys([*SIX[rank], EXPERTS], 5)
        assert report.nbytes_total == 0
        assert (report.nbytes_exchanged > 0) is (rank == 2)


def test_without_snapshots_of_one_step_experts_are_still_newer_than_storage(tmp_path: Path) -> None:
    memories = [ucp.Snapshots() for _ in range(6)]
    train(tmp_path, memories, [[3], [5], [5], [5], [5], [5]])
    for rank, (steps, _) in enumerate(load(tmp_path, memories, SIX)):
        assert steps == dict.fromkeys([*SIX[rank], EXPERTS], 5)


def test_a_step_that_is_done_again_replaces_its_snapshot(tmp_path: Path) -> None:
    memory = ucp.Snapshots()
    for step, scale in ((3, 1.0), (4, 1.0), (5, 2.0), (5, 1.0)):
        model, optimizer = make_model([*range(EXPERTS)], step, scale=scale)
        memory.take(model, optimizer, "dp=1", step=step)
    assert [snapshot.step for snapshot in memory._snapshots] == [4, 5]
    ucp.save(model, optimizer, "dp=1", tmp_path / "step5", step=5)
    nn.init.zeros_(model["layers"][0]["router"].weight)  # what was copied stays
    model, optimizer = make_model([*range(EXPERTS)], 99)
    report = ucp.load_into(model, "dp=1", tmp_path / "step5", optimizer=optimizer, snapshots=memory)
    assert set(read_steps(model, optimizer, [*range(EXPERTS)]).values()) == {5}
    assert (report.nbytes_read, report.nbytes_exchanged) == (0, 0)


def test_the_scheduler_is_of_the_step_of_the_snapshot(tmp_path: Path) -> None:
    memory = ucp.Snapshots()
    model, optimizer = make_model([0, 1], 3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    ucp.save(model, optimizer, None, tmp_path / "step3", step=3, scheduler=scheduler)
    optimizer.zero_grad()
    for step in (4, 5, 6):
        optimizer.step()
        scheduler.step()
        if step < 6:  # the last step is lost
            memory.take(model, optimizer, None, step=step, scheduler=scheduler)
    model, optimizer = make_model([0, 1], 99)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    report = ucp.load_into(model, tmp_path / "step3", optimizer=optimizer, scheduler=scheduler, snapshots=memory)
    assert (report.step, scheduler.last_epoch) == (5, 2)
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.25 / 10)]


@pytest.mark.parametrize(
    ("before", "left", "after"),
    [
        ("dp=2,tp=2", [0, 3], "tp=2"),
        ("dp=2,tp=2", [2, 1], "dp=2"),
        ("dp=2,tp=2", [0, None, 2, 3], "dp=2,tp=2"),
        ("dp=2,pp=2", [1, 2], "dp=2"),
        ("dp=2,tp=2,ep=2", [0, 1, 2, 3], "tp=2,pp=2"),
    ],
)
def test_survivors_load_at_another_topology(before: str, left: list[int | None], after: str, tmp_path: Path) -> None:
    saved = Saved(tmp_path / "saved", Sizes(layers=2))
    memories: dict[int | None, ucp.Snapshots] = {rank: ucp.Snapshots() for rank in range(4)}

    def take(ranks: ThreadRanks) -> None:
        model, optimizer = load_saved(saved, before, ranks)
        memories[ranks.rank].take(model, optimizer, before, step=9, like=saved.path, process_group=ranks)

    def go_on(ranks: ThreadRanks) -> ucp.LoadReport:
        snapshots = memories.get(left[ranks.rank], ucp.Snapshots())
        model, optimizer, report = make_and_load(saved, after, ranks, snapshots=snapshots)
        path = tmp_path / "again"
        ucp.save(model, optimizer, after, path, step=9, like=saved.path, process_group=ranks)
        return report

    assert run_threads(4, take) == [None] * 4
    for report in run_threads(len(left), go_on):
        assert (report.nbytes_total, report.step) == (0, 9)
    difference = ucp.diff(saved.path, tmp_path / "again")
    assert difference.equal, difference


def test_a_checkpoint_that_is_newer_than_memory_is_loaded(tmp_path: Path) -> None:
    memory, experts = ucp.Snapshots(), [*range(EXPERTS)]
    memory.take(*make_model(experts, 5), "dp=1", step=5)
    ucp.save(*make_model(experts, 6), "dp=1", tmp_path / "step6", step=6)
    model, optimizer = make_model(experts, 99)
    report = ucp.load_into(model, "dp=1", tmp_path / "step6", optimizer=optimizer, snapshots=memory)
    assert set(read_steps(model, optimizer, experts).values()) == {6}
    assert (report.step, report.nbytes_memory) == (6, 0)


def test_dense_parts_are_never_of_two_steps(tmp_path: Path) -> None:
    """The second stage is lost: the first is loaded from storage, too, but for its experts."""
    saved = Saved(tmp_path / "saved", Sizes(layers=2))
    memories = [ucp.Snapshots(), ucp.Snapshots()]

    def work(ranks: ThreadRanks) -> ucp.LoadReport:
        model, optimizer = load_saved(saved, "pp=2", ranks)
        for name, param in model.named_parameters():
            if "experts" not in name:
                nn.init.zeros_(param)
        memories[ranks.rank].take(model, optimizer, "pp=2", step=90, process_group=ranks)
        snapshots = ucp.Snapshots() if ranks.rank else memories[0]
        model, optimizer, report = make_and_load(saved, "pp=2", ranks, snapshots=snapshots)
        ucp.save(model, optimizer, "pp=2", tmp_path / "again", step=9, process_group=ranks)
        return report

    for report in run_threads(2, work):
        assert report.step == ucp.inspect(saved.path).step
    difference = ucp.diff(saved.path, tmp_path / "again")
    assert difference.equal, difference


def load_saved(saved: Saved, topology: str, ranks: ThreadRanks) -> tuple[nn.Module, torch.optim.Optimizer]:
    """This rank's part of what was saved."""
    return make_and_load(saved, topology, ranks)[:2]


def make_and_load(
    saved: Saved, topology: str, ranks: ThreadRanks, **options: object
) -> tuple[nn.Module, torch.optim.Optimizer, ucp.LoadReport]:
    """A new model and optimizer of this rank, loaded, and the report."""
    (held,) = local(saved, Place(ucp.Topology.parse(topology), ranks.rank))
    model = module({name: states["weight"].shape for name, (_, states) in held.items()})
    optimizer = torch.optim.AdamW(model.parameters())
    report = ucp.load_into(model, topology, saved.path, optimizer=optimizer, process_group=ranks, **options)
    return model, optimizer, report


@pytest.mark.parametrize("memory", [64, 1 << 20])
def test_boxes_are_sent_in_rounds_by_the_ranks_that_send_least(memory: int) -> None:
    """Ranks 0 and 1 have eight boxes of a tensor, rank 2 needs all of it, and rank 3 nothing."""
    reads: list[list[int]] = [[], [], [], []]

    class Boxes:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def overlay(self, index: object, ranks: object, *, exact: bool) -> None: ...

        def read(self, offset: int, nbytes: int) -> bytes:
            reads[self.rank].append(offset)
            return bytes(range(offset, offset + nbytes))

    def work(ranks: ThreadRanks) -> tuple[list[int], int]:
        items, tensors = [], []
        for start in range(8 if ranks.rank == 2 else 0):
            fragments = []
            for owner in (0, 1):
                ref = TensorRef(
                    path=memory_path(owner), offset=16 * start, dtype=DType.UINT8, shape=(16,), strides=(1,)
                )
                fragments.append(Fragment(box=Box((0,), (16,)), ref=ref, replica=owner))
            state = StateIndex(dtype=DType.UINT8, global_shape=(16,), fragments=tuple(fragments))
            slice_ = full_slice(f"w{start}", "weight", state)
            items.append(LoadItem(name=f"w{start}", slice=slice_, source=state))
            tensors.append(torch.zeros(16, dtype=torch.uint8))
        options = CarryOptions(memory=memory)
        traffic = carry_with_memory(items, tensors, ranks, options, Boxes(ranks.rank))  # type: ignore[arg-type]
        assert traffic.peak_nbytes <= memory // 2  # a round, of bytes received and sent
        return [byte for tensor in tensors for byte in tensor.tolist()], traffic.exchanged_nbytes

    results = run_threads(4, work)
    assert results[2] == ([*range(128)], 128)
    assert [len(offsets) for offsets in reads] == [4, 4, 0, 0]


@pytest.mark.parametrize(
    "options", [{"snapshots": "memory"}, {"snapshots": []}, {"snapshots": ucp.Snapshots(), "at": 1}]
)
def test_what_is_no_memory_or_has_another_iteration_is_refused(options: dict[str, object], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ucp.save(model, False, "dp=1", tmp_path / "saved", step=1)
    with pytest.raises(UsageError):
        ucp.load_into(model, "dp=1", tmp_path / "saved", **options)  # type: ignore[arg-type]
