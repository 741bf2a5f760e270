"""States that others like a parameter have: the rule, and a genuine folder that lost one moment, told by every verb."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ucp
from ucp.core.gaps import find_state_gaps
from ucp.core.index import Kind, LostStates, ParamGroup
from ucp.errors import MissingStateError
from ucp.testing.handmade import Shards, make_index

FIXTURES = Path(__file__).parents[3] / "fixtures" / "deepspeed"
ADAM = {"exp_avg", "exp_avg_sq", "step"}
LOST = "l2.weight: exp_avg_sq"


@pytest.fixture
def made(tmp_path):
    """`made(shapes={name: shape}, states={name: ...}, switches={name: ...})`: an index of such parameters."""

    def make(states: Mapping[str, set[str]], *, switches: Mapping[str, object] | None = None, shapes=None):
        shards = Shards(tmp_path)
        own = {
            (name, state): shards.whole(np.ones((shapes or {}).get(name, (4, 4)), dtype=np.float32))
            for name, kept in states.items()
            for state in ("weight", *sorted(kept))
        }
        groups = [ParamGroup(params=(name,), hyper=own) for name, own in (switches or {}).items()]
        return make_index(tmp_path, own, groups=groups)

    return make


def test_a_part_of_what_another_has_is_a_gap(made):
    rates = {name: {"lr": rate} for name, rate in {"a": 0.1, "b": 0.2, "c": 0.1}.items()}
    index = made({"a": ADAM, "b": {"exp_avg"}, "c": ADAM - {"step"}, "frozen": set()}, switches=rates)
    assert find_state_gaps(index) == {"b": ("exp_avg_sq", "step"), "c": ("step",)}


@pytest.mark.parametrize(
    ("states", "more"),
    [
        ({"muon": {"momentum_buffer"}, "adam": ADAM}, {}),
        (
            {"plain": ADAM, "amsgrad": {*ADAM, "max_exp_avg_sq"}},
            {"switches": {"plain": {"amsgrad": False}, "amsgrad": {"amsgrad": True}}},
        ),
        (
            {"lion": {"exp_avg"}, "adam": ADAM},
            {"switches": {"lion": {"betas": (0.9, 0.99)}, "adam": {"betas": (0.9, 0.95), "eps": 1e-8}}},
        ),
        ({"matrix": {*ADAM, "preconditioner"}, "bias": ADAM}, {"shapes": {"bias": (4,)}}),
    ],
    ids=["other states", "another setting", "another optimizer", "another number of dims"],
)
def test_what_has_other_states_for_a_reason(states, more, made):
    assert find_state_gaps(made(states, **more)) == {}


def test_buffers_and_what_the_user_left_out_are_no_gaps(made):
    index = made({"a": ADAM, "b": {"exp_avg"}, "c": {"step"}})
    atoms = {**index.atoms, "b": replace(index.atoms["b"], kind=Kind.BUFFER)}
    left_out = {"c": LostStates(reason="left out", is_chosen=True)}
    assert find_state_gaps(replace(index, atoms=atoms, lost=left_out)) == {}


@pytest.fixture
def gap(tmp_path) -> Path:
    """A universal checkpoint without one moment of one parameter."""
    path = Path(shutil.copytree(FIXTURES / "z1-dp4-fp32" / "universal", tmp_path / "gap"))
    (path / "global_step3_universal" / "zero" / "l2.weight" / "exp_avg_sq.pt").unlink()
    return path


def test_verify_and_diff_tell_of_it(gap, tmp_path):
    (problem,) = ucp.verify(gap).problems
    assert LOST in problem
    report = ucp.diff(gap, FIXTURES / "z1-dp4-fp32" / "universal")
    assert not report.equal
    assert [LOST in note for note in report.notes] == [True]


def test_conversions_to_atoms_warn_of_it(gap):
    assert any(LOST in warning for warning in ucp.plan(gap).warnings)
    assert not any(LOST in warning for warning in ucp.plan(gap, include=["*/weight"]).warnings)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_files_of_a_framework_are_refused(zero, gap):
    asked = {"to": "deepspeed", "topology": f"dp=1,zero={zero}"}
    with pytest.raises(MissingStateError, match=LOST):
        ucp.plan(gap, **asked)
    assert ucp.plan(gap, **asked, include=["*/weight"])


def test_a_selection_of_the_user_passes(gap, tmp_path):
    """What is left out by hand is named where it is left out, and a store remembers that."""
    whole = FIXTURES / "z1-dp4-fp32" / "universal"
    report = ucp.convert(whole, tmp_path / "atoms", exclude=["l2.weight/exp_avg_sq"], workers=1)
    assert report.warnings == ()
    assert ucp.verify(tmp_path / "atoms").ok


RATES = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


def test_a_name_that_few_parameters_have_stands_for_the_state_that_is_lost(made):
    states = {"a": ADAM, "b": ADAM, "c": {"exp_avg", "step", "exp_evg_sq"}, "muon": {"momentum_buffer"}}
    assert find_state_gaps(made(states)) == {"c": ("exp_avg_sq",)}
    stacked = {"a": ADAM, "b": ADAM, "d": states["c"], "c": ADAM, "e": states["c"]}
    assert find_state_gaps(made(stacked)) == {"d": ("exp_avg_sq",), "e": ("exp_avg_sq",)}


@pytest.mark.parametrize(
    "states",
    [
        {"adam": {"use_muon", *ADAM}, "muon": {"use_muon", "momentum_buffer"}},  # of one group, as Moonlight's Muon
        {"a": {"use_muon", "exp_avg"}, "b": {"use_muon", "exp_avg"}, "c": {"momentum_buffer"}},
    ],
)
def test_states_that_are_no_damaged_names(states, made):
    assert find_state_gaps(made(states)) == {}


def test_a_setting_that_a_parameter_alone_lacks(made):
    damaged = {"mr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    index = made({"a": ADAM, "b": ADAM, "c": ADAM}, switches={"a": RATES, "b": RATES, "c": damaged})
    assert find_state_gaps(index) == {"c": ("the setting lr",)}


@pytest.mark.parametrize(
    "others",
    [
        {"lr": 0.2, "betas": (0.9, 0.95)},  # values of its own
        {"lr": 0.1},  # another optimizer
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ],
)
def test_groups_that_have_other_settings_for_a_reason(others, made):
    states = {"a": {"exp_avg"}, "b": {"exp_avg"}, "c": {"exp_avg"}}
    assert find_state_gaps(made(states, switches={"a": RATES, "b": RATES, "c": others})) == {}
