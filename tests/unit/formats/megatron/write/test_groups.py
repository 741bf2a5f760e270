from __future__ import annotations

import numpy as np
import pytest
from ucp_formats.megatron.write.groups import make_chain

from ucp.contract.optimizer import OptimizerPlan
from ucp.core.index import Index, ParamGroup
from ucp.core.union import state_from_number
from ucp.errors import MissingStateError, UnsupportedError
from ucp.testing.handmade import Shards, make_index
from ucp.transfer.probe import Prober

DENSE, EXPERT, NORM = "dense", "expert", "norm"


def native(params: tuple[str, ...], *, wd: float, expert: bool = False, **more: object) -> ParamGroup:
    return ParamGroup(params=params, hyper={"lr": 0.1, "wd_mult": wd, "is_expert_parallel": expert, **more})


@pytest.fixture
def index(tmp_path):
    def make(*groups: ParamGroup, step: object = 4) -> Index:
        shards = Shards(tmp_path)
        states = {(name, "weight"): shards.whole(np.zeros(2, dtype=np.float32)) for name in (DENSE, EXPERT, NORM)}
        for name in (DENSE, EXPERT, NORM):
            if isinstance(step, np.generic | np.ndarray):
                states[name, "step"] = shards.whole(np.asarray(step))
            elif step is not None:
                states[name, "step"] = state_from_number(step)
        return make_index(tmp_path, states, groups=groups)

    return make


def plan_of(index: Index) -> OptimizerPlan:
    with Prober() as prober:
        return OptimizerPlan(index, prober)


def chain_of(index: Index, experts: frozenset[str] = frozenset(), *, split: bool):
    return make_chain(index, experts, plan_of(index), split=split)


def shown(chain):
    return [
        [(group.params, group.hyper["wd_mult"], group.hyper["is_expert_parallel"]) for group in own] for own in chain
    ]


def test_groups_that_differ_otherwise_stay_apart(index):
    groups = (native((NORM,), wd=0.0), native((DENSE,), wd=1.0), native((EXPERT,), wd=1.0, is_decoupled_lr=True))
    found, _ = chain_of(index(*groups), split=False)
    assert [group.params for group in found[0]] == [(DENSE,), (EXPERT,), (NORM,)]


@pytest.mark.parametrize(("step", "kind"), [(4, int), (4.0, float), (np.float32(4), float), (np.int64(4), int)])
def test_a_step_stays_the_kind_of_number_it_was(step, kind, index):
    """torch's Adam counts in float, Apex's and Transformer Engine's in whole numbers."""
    found, _ = chain_of(index(native((DENSE, EXPERT, NORM), wd=1.0), step=step), split=False)
    assert found[0][0].entry()["step"] == 4
    assert type(found[0][0].step) is kind
    assert found[0][0].counts == (kind is int)


def test_a_step_of_the_group(index):
    found, _ = chain_of(index(native((DENSE,), wd=1.0, step=6), step=None), split=False)
    assert (found[0][0].step, found[0][0].counts) == (6, True)


def test_groups_of_another_framework(index):
    group = ParamGroup(params=(DENSE, NORM), hyper={"lr": 0.2, "betas": (0.9, 0.95), "weight_decay": 0.0})
    found, notes = chain_of(index(group), split=False)
    assert shown(found) == [[((), 1.0, False), ((DENSE, NORM), 0.0, False)]]
    assert found[0][1].hyper["max_lr"] == 0.2
    assert len(notes) == 1
    assert "handmade" in notes[0]


def test_steps_that_differ_are_named(index, tmp_path):
    shards = Shards(tmp_path)
    states = {}
    for number, name in enumerate((DENSE, NORM)):
        states[name, "weight"] = shards.whole(np.zeros(2, dtype=np.float32))
        states[name, "step"] = state_from_number(number)
    source = make_index(tmp_path, states, groups=[native((DENSE, NORM), wd=1.0)])
    with pytest.raises(UnsupportedError, match=r"(?s)dense: 0.*norm: 1"):
        chain_of(source, split=False)


def test_files_that_list_parameters_of_groups_refuse_those_in_none(index):
    source = index(native((DENSE, NORM), wd=1.0))
    plan_of(source).check_grouped((DENSE, NORM), remedy="")
    with pytest.raises(MissingStateError, match=r" 1 .*\n  expert\nwrite others"):
        plan_of(source).check_grouped(source.atoms, remedy="write others")
