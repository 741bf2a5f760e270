"""Sparse windows: laws of their schedules, and the links that they write."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ucp
from tests.unit.live.threads import ThreadRanks
from tests.unit.live.threads import run as run_threads
from ucp.errors import MissingStateError, ReplicaError, UsageError
from ucp.saving.window import OperatorSize, find_operators, order_operators, pack_slots

SIZES = st.dictionaries(
    st.text(min_size=1, max_size=3),
    st.tuples(st.integers(1, 40), st.integers(0, 8)).map(lambda pair: OperatorSize(sum(pair), pair[1])),
    min_size=1,
    max_size=12,
)


def slot_nbytes(sizes: Mapping[str, OperatorSize], slots: tuple[tuple[str, ...], ...], number: int) -> int:
    later = chain.from_iterable(slots[number + 1 :])
    return sum(sizes[name].full for name in slots[number]) + sum(sizes[name].cast for name in later)


@given(sizes=SIZES, nbytes=st.integers(1, 400))
def test_slots_partition_the_operators_and_each_fits(sizes: dict[str, OperatorSize], nbytes: int) -> None:
    casts = [sum(size.cast for size in list(sizes.values())[number + 1 :]) for number in range(len(sizes))]
    fits_alone = all(size.full + later <= nbytes for size, later in zip(sizes.values(), casts, strict=True))
    if not fits_alone:
        with pytest.raises(UsageError):
            pack_slots(sizes, nbytes=nbytes)
        return
    slots = pack_slots(sizes, nbytes=nbytes)
    assert list(chain.from_iterable(slots)) == list(sizes)
    assert all(slots)
    for number, slot in enumerate(slots):
        assert slot_nbytes(sizes, slots, number) <= nbytes
        if number:  # no slot has room for the next operator
            larger = (*slots[: number - 1], (*slots[number - 1], slot[0]), slot[1:], *slots[number + 1 :])
            assert slot_nbytes(sizes, larger, number - 1) > nbytes


def test_figure_6_of_the_paper() -> None:
    """Six equal operators, 12 bytes in full and 2 as a cast: slots of 32, 28 and 24 bytes."""
    sizes = {name: OperatorSize(12, 2) for name in "abcdef"}
    slots = pack_slots(sizes, nbytes=32)
    assert [slot_nbytes(sizes, slots, number) for number in range(3)] == [32, 28, 24]
    with pytest.raises(UsageError, match="of a take 12"):
        pack_slots(sizes, nbytes=21)


NAMES = ["emb.weight", *(f"layers.{n}.{name}" for n in range(2) for name in ("norm.weight", "moe.gate.weight"))]
NAMES += [f"layers.{n}.moe.experts.{e}.w{k}.weight" for n in range(2) for e in range(2) for k in (1, 2)]
SHAPES = dict.fromkeys([*NAMES, "layers.0.moe.gate.e_score_correction_bias"], (2, 2))


def test_operators_are_experts_routers_and_the_rest_of_layers() -> None:
    buffers = frozenset(SHAPES) - frozenset(NAMES)
    operators = find_operators(SHAPES, buffers)
    assert sorted(chain.from_iterable(operators.values())) == sorted(NAMES)
    assert operators["layers.1.moe.experts.0"] == tuple(f"layers.1.moe.experts.0.w{k}.weight" for k in (1, 2))
    rest = ["emb", "layers.0", "layers.0.moe.router", "layers.1", "layers.1.moe.router"]
    popularity = {"layers.0.moe": [3, 1], "layers.1.moe": [2, 4]}
    experts = ["layers.0.moe.experts.1", "layers.1.moe.experts.0", "layers.0.moe.experts.0", "layers.1.moe.experts.1"]
    assert order_operators(operators, SHAPES, popularity) == [*experts, *rest]
    for wrong in ({"layers.0.moe": [3, 1]}, {**popularity, "layers.2.moe": [1]}, {**popularity, "layers.1.moe": [1]}):
        with pytest.raises(UsageError, match=r"layers\.[12]\.moe"):
            order_operators(operators, SHAPES, wrong)


def test_experts_in_one_tensor_are_one_operator() -> None:
    shapes = {"moe.gate.weight": (4, 2), "moe.experts.w1": (4, 3, 2), "moe.experts.w2": (4, 2, 3)}
    operators = find_operators(shapes, frozenset())
    assert operators == {"moe.router": ("moe.gate.weight",), "moe.experts": ("moe.experts.w1", "moe.experts.w2")}
    assert order_operators(operators, shapes, {"moe": [1, 2, 3, 4]}) == ["moe.experts", "moe.router"]


@pytest.mark.parametrize(
    ("now", "shifted"),
    [([10, 10, 10, 10], False), ([20, 20, 20, 20], False), ([10.9, 9.9, 9.9, 9.3], False), ([14, 9.5, 9.5, 7], True)],
)
def test_the_order_is_renewed_if_a_quarter_of_the_experts_changed_by_a_tenth(now: list[float], shifted: bool) -> None:
    assert ucp.SparseWindow.has_shifted({"moe": [10, 10, 10, 10]}, {"moe": now}) is shifted
    assert not ucp.SparseWindow.has_shifted({}, {})
    for other in ({}, {"moe": [1]}, {"mlp": [1, 2]}):
        with pytest.raises(UsageError, match="moe"):
            ucp.SparseWindow.has_shifted({"moe": [1, 2]}, other)


EXPERTS = 2


class Moe(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.emb = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.moe = nn.Module()
        self.moe.router = nn.Linear(2, EXPERTS, bias=False, dtype=dtype)
        self.moe.experts = nn.ModuleList(nn.Linear(2, 2, bias=False, dtype=dtype) for _ in range(EXPERTS))
        self.register_buffer("seen", torch.zeros(1))


WINDOW = ucp.SparseWindow((("moe.experts.0", "moe.experts.1"), ("moe.router",), ("emb",)))
SLOT_OF = {"moe.experts.0.weight": 1, "moe.experts.1.weight": 1, "moe.router.weight": 2, "emb.weight": 3}


def save_links(folder: Path, steps: range, plan: ucp.SparseWindow = WINDOW, ranks: ThreadRanks | None = None) -> None:
    """Links of a run whose masters are its step and a bit, which bfloat16 rounds away."""
    model = Moe(torch.bfloat16)
    masters = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(list(masters.values()))
    for step in steps:
        for name, param in model.named_parameters():
            masters[name].grad = torch.ones_like(masters[name])
            masters[name].data.fill_(step + 2**-20)
            param.data.fill_(step)
        optimizer.step()
        for master in masters.values():
            master.data.fill_(step + 2**-20)
        extras = {"clip_norm": 1.0}
        arguments = {"masters": masters, "step": step, "plan": plan, "chain": True, "extras": extras}
        topology = None if ranks is None else f"dp={ranks.count}"
        ucp.save(model, optimizer, topology, folder / f"step{step}", **arguments, process_group=ranks)


def test_each_link_has_one_slot_in_full_and_casts_of_later_ones(tmp_path: Path) -> None:
    save_links(tmp_path, range(1, 8))
    for step in range(1, 8):
        link, slot = ucp.open(tmp_path / f"step{step}"), (step - 1) % 3 + 1
        assert set(link) == {"seen", *(name for name, own in SLOT_OF.items() if own >= slot)}
        for name in set(link) - {"seen"}:
            is_full = SLOT_OF[name] == slot
            assert link[name].index.is_cast is not is_full
            nbytes = sum(state.nbytes for key, state in link[name].index.states.items() if key != "step")
            assert nbytes == link[name].index.states["weight"].numel * (12 if is_full else 2)  # MoEtion: 83 % less
            assert set(link[name].states) == ({"weight", "step", "exp_avg", "exp_avg_sq"} if is_full else {"weight"})
            assert link.read(name)[0, 0].item() == (step + 2**-20 if is_full else step)
            assert link[name].dtype("weight") is (torch.float32 if is_full else torch.bfloat16)


def test_a_cast_never_wins_over_a_full_state(tmp_path: Path) -> None:
    save_links(tmp_path, range(1, 6))  # the fifth is the second of its window
    checkpoint = ucp.open(tmp_path)
    got = {name: checkpoint.read(name)[0, 0].item() - 2**-20 for name in SLOT_OF}
    assert got == {"moe.experts.0.weight": 4, "moe.experts.1.weight": 4, "moe.router.weight": 5, "emb.weight": 3}
    assert {name: atom.index.iteration for name, atom in checkpoint.items() if atom.index.iteration} == {
        "emb.weight": 3,
        "moe.experts.0.weight": 4,
        "moe.experts.1.weight": 4,
    }
    with pytest.raises(MissingStateError, match=r"emb\.weight"):
        ucp.open(tmp_path, at=2)


def test_the_first_link_has_the_weights_of_its_iteration(tmp_path: Path) -> None:
    save_links(tmp_path / "chain", range(1, 3))
    ucp.convert(tmp_path / "chain/step1", tmp_path / "weights", dtypes={"weight": "bfloat16"}, verify=True)
    weights = ucp.open(tmp_path / "weights")
    assert any("2 parameters have only" in note for note in ucp.inspect(tmp_path / "chain/step1").notes)
    assert {weights.read(name)[0, 0].item() for name in SLOT_OF} == {1}
    model = Moe()
    with pytest.raises(ucp.UcpError, match=r"emb\.weight"):  # not to be resumed from
        ucp.load_into(model, None, tmp_path / "chain/step1", optimizer=torch.optim.AdamW(model.parameters()))


def test_what_a_sparse_save_needs(tmp_path: Path) -> None:
    arguments = {"step": 1, "plan": WINDOW, "chain": True}
    with pytest.raises(UsageError, match="clip_norm"):
        ucp.save(Moe(), None, None, tmp_path / "a", **arguments)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UsageError, match="skipped"):
        ucp.save(Moe(), None, None, tmp_path / "a", **arguments, scaler=scaler, extras={"clip_norm": None})
    arguments["extras"] = {"clip_norm": None}
    for changed in ({"chain": False}, {"step": 0}, {"step": None}):
        with pytest.raises(UsageError):
            ucp.save(Moe(), None, None, tmp_path / "a", **{**arguments, **changed})
    for slots, name in (((("emb",),), "moe.router"), ((*WINDOW.slots, ("head",)), "head")):
        with pytest.raises(UsageError, match=name):
            ucp.save(Moe(), None, None, tmp_path / "a", **{**arguments, "plan": ucp.SparseWindow(slots)})
    for slots in ((), (("emb",), ("emb",))):
        with pytest.raises(UsageError):
            ucp.SparseWindow(slots)
    assert not list(tmp_path.iterdir())


def test_ranks_have_one_plan(tmp_path: Path) -> None:
    plans = [WINDOW, ucp.SparseWindow(WINDOW.slots[::-1])]
    errors = run_threads(2, lambda ranks: save_links(tmp_path, range(1, 2), plans[ranks.rank], ranks))
    assert [type(error) for error in errors] == [ReplicaError, ReplicaError]


def test_a_plan_made_of_bytes(tmp_path: Path) -> None:
    model = Moe()
    ucp.save(model, torch.optim.SGD(model.parameters()), None, tmp_path / "full", step=0)
    budget = {"bandwidth": 20.0, "seconds": 4.0}  # 16 bytes an operator, and 4 for the buffer
    plan = ucp.SparseWindow.fit(tmp_path / "full", **budget, first=5, popularity={"moe": [2, 1]})
    assert plan.slots == (("moe.experts.1", "moe.experts.0", "emb", "moe.router"),)
    with pytest.raises(UsageError, match=r"moe\.experts\.1"):
        ucp.SparseWindow.fit(tmp_path / "full", bandwidth=10.0, seconds=4.0, popularity={"moe": [2, 1]})
    ucp.save(model, torch.optim.AdamW(model.parameters()), None, tmp_path / "unstepped", step=0)
    with pytest.raises(UsageError, match=r"moe\.experts\.1"):  # moments that it will have are not counted
        ucp.SparseWindow.fit(tmp_path / "unstepped", **budget)
    assert plan.begins_at(5)
    assert [WINDOW.begins_at(step) for step in range(1, 5)] == [True, False, False, True]
