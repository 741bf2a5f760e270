"""Moments that are all zero although steps were taken, made by hand; for genuine files see the golden tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ucp.core.index import Index, Kind, ParamGroup
from ucp.core.tensor import DType
from ucp.core.union import state_from_number
from ucp.errors import MalformedError
from ucp.io.elements import numpy_dtype
from ucp.source.moments import ZeroMoments, check_moments, describe_zero_moments, detect_first_step
from ucp.testing.handmade import Shards, make_index

Made = Callable[..., Index]


@pytest.fixture
def made(tmp_path) -> Made:
    """`made(step=3, group=ParamGroup(...), **moments)`: two parameters of 1000 elements with these moments each."""

    def make(*, step: float | None = 3, group: ParamGroup | None = None, **moments: np.ndarray) -> Index:
        shards = Shards(tmp_path)
        states = {}
        for name in ("a", "b"):
            states[name, "weight"] = shards.whole(np.ones(1000, dtype=np.float32))
            for state, values in moments.items():
                states[name, state] = shards.whole(values)
            if step is not None:
                states[name, "step"] = state_from_number(step)
        return make_index(tmp_path, states, groups=(group,) if group else ())

    return make


ZEROS = np.zeros(1000, dtype=np.float32)


def spike(at: int) -> np.ndarray:
    values = ZEROS.copy()
    values[at] = 1e-30
    return values


def test_all_zero_is_refused_with_the_way_on(made):
    index = made(exp_avg=ZEROS, exp_avg_sq=ZEROS)
    with pytest.raises(MalformedError, match=r"exp_avg, exp_avg_sq is zero .* 2 ") as caught:
        check_moments(index, ZeroMoments.ERROR)
    assert "--exclude '*/exp_avg' --exclude '*/exp_avg_sq'" in str(caught.value)
    assert "--zero-moments keep" in str(caught.value)
    assert "zero wherever they were sampled" in (describe_zero_moments(index) or "")


@pytest.mark.parametrize("at", [0, 5, 200, 499, 777, 999])
def test_a_single_element_anywhere_is_enough(at, made):
    check_moments(made(exp_avg=ZEROS, exp_avg_sq=spike(at)), ZeroMoments.ERROR)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, "bfloat16", "float8_e5m2"])
def test_zeros_of_either_sign_are_zeros(dtype, made):
    zeros = ZEROS.astype(numpy_dtype(DType(dtype)) if isinstance(dtype, str) else dtype)
    mixed = zeros.copy()
    mixed[::3] = -0.0
    assert mixed.tobytes() != zeros.tobytes()
    index = made(exp_avg=mixed, exp_avg_sq=-zeros)
    assert describe_zero_moments(index) is not None
    with pytest.raises(MalformedError, match="exp_avg, exp_avg_sq"):
        check_moments(index, ZeroMoments.ERROR)
    least = mixed.copy()
    least.view(np.uint8)[499 * least.itemsize] = 1
    check_moments(made(exp_avg=least), ZeroMoments.ERROR)


def test_a_byte_of_a_sign_in_another_place_is_a_value(made):
    """0x00000080 is a number, if a very small one."""
    tiny = np.full(1000, 0x80, dtype=np.uint32).view(np.float32)
    assert 0 < tiny[0] < 1e-40
    check_moments(made(exp_avg=tiny), ZeroMoments.ERROR)
    assert describe_zero_moments(made(exp_avg=tiny)) is None


def test_what_no_window_saw_is_a_note_at_most(made):
    """Windows lie at both ends and in the middle: an inspection says what it saw, a conversion looks at everything."""
    index = made(exp_avg=spike(200))
    assert describe_zero_moments(index) is not None
    check_moments(index, ZeroMoments.ERROR)


@pytest.mark.parametrize(
    "options",
    [
        {"step": 0, "exp_avg": ZEROS},
        {"step": 0.0, "exp_avg": ZEROS},
        {"step": None, "exp_avg": ZEROS, "group": ParamGroup(params=("a", "b"), hyper={"step": 0, "lr": 0.1})},
        {"exp_avg": ZEROS, "group": ParamGroup(params=("a", "b"), hyper={"lr": 0.0})},
        {"step": 3},
        {"counter": np.zeros((), dtype=np.float32)},
        {"mask": np.zeros(1000, dtype=np.int8)},
    ],
)
def test_what_is_as_it_should_be(options, made):
    """No step taken, nothing to learn from, or nothing that could be a moment."""
    index = made(**options)
    check_moments(index, ZeroMoments.ERROR)
    assert describe_zero_moments(index) is None


def test_steps_of_a_group(made):
    group = ParamGroup(params=("a", "b"), hyper={"step": 7, "lr": 0.1})
    with pytest.raises(MalformedError):
        check_moments(made(step=None, exp_avg=ZEROS, group=group), ZeroMoments.ERROR)


def test_steps_of_the_run_where_no_other_is_recorded(made):
    """SGD counts none."""
    index = made(step=None, momentum_buffer=ZEROS)
    for step in (0, None):
        check_moments(replace(index, step=step), ZeroMoments.ERROR)
    with pytest.raises(MalformedError, match=r"momentum_buffer is zero .* 2 "):
        check_moments(replace(index, step=4), ZeroMoments.ERROR)


@pytest.mark.parametrize(("step", "skipped", "is_fine"), [(0, 0, True), (3, 3, True), (3, 2, False), (None, 0, False)])
def test_a_run_that_took_no_step_has_none_to_show(step, skipped, is_fine, made):
    """Wrappers of DeepSpeed step once without gradients as they are built, and count that."""
    index = replace(made(step=1, exp_avg=ZEROS), step=step, skipped=skipped)
    if is_fine:
        check_moments(index, ZeroMoments.ERROR)
        assert describe_zero_moments(index) is None
    else:
        with pytest.raises(MalformedError, match=r"exp_avg is zero .* 2 "):
            check_moments(index, ZeroMoments.ERROR)


def test_a_part_is_judged_by_the_whole(made):
    whole = made(exp_avg=ZEROS)
    part = replace(whole, atoms={"a": whole.atoms["a"]})
    with pytest.raises(MalformedError, match=r"exp_avg is zero .* 2 "):
        check_moments(whole, ZeroMoments.ERROR, selection=part)
    bare = {name: replace(atom, states={"weight": atom.states["weight"]}) for name, atom in whole.atoms.items()}
    check_moments(whole, ZeroMoments.ERROR, selection=replace(whole, atoms=bare))


def test_frozen_parameters_have_no_say(made):
    index = made(exp_avg=ZEROS)
    frozen = {name: replace(atom, kind=Kind.FROZEN) for name, atom in index.atoms.items()}
    check_moments(replace(index, atoms=frozen), ZeroMoments.ERROR)


def test_a_file_that_is_gone_is_for_others_to_tell(made, tmp_path):
    index = made(exp_avg=ZEROS)
    for path in {fragment.path for _, _, state in index.states() for fragment in state.fragments if fragment.path}:
        (tmp_path / path).unlink()
    check_moments(index, ZeroMoments.ERROR)
    assert describe_zero_moments(index) is None


def test_a_moment_that_cannot_be_read_is_no_proof(made, tmp_path):
    """Before, one unreadable window counted as a moment that is not zero, and the rest was not looked at."""
    index = made(exp_avg=ZEROS, exp_avg_sq=ZEROS)
    state = index.atoms["a"].states["exp_avg"]
    (piece,) = state.fragments
    lost = replace(piece, ref=replace(piece.ref, path=str(tmp_path / "lost")))
    states = {**index.atoms["a"].states, "exp_avg": replace(state, fragments=(lost,))}
    index = replace(index, atoms={**index.atoms, "a": replace(index.atoms["a"], states=states)})
    assert describe_zero_moments(index) is not None
    with pytest.raises(MalformedError, match=r"exp_avg, exp_avg_sq is zero .* 2 "):
        check_moments(index, ZeroMoments.ERROR)


def test_an_optimizer_that_was_made_to_be_saved_is_at_step_0(made):
    """As get_state_dict of torch makes it: one step with gradients of zero."""
    index = detect_first_step(replace(made(step=1, exp_avg=ZEROS, exp_avg_sq=ZEROS), step=None))
    assert index.step == 0
    assert "has not stepped yet" in index.notes[-1]
    assert describe_zero_moments(index) is None
    check_moments(index, ZeroMoments.ERROR)


@pytest.mark.parametrize(("run", "counted", "moments"), [(1000, 1, ZEROS), (None, 2, ZEROS), (None, 1, spike(5))])
def test_a_later_step_or_a_moment_that_holds_something_is_none_before_the_first(made, run, counted, moments):
    index = replace(made(step=counted, exp_avg=moments, exp_avg_sq=moments), step=run)
    assert detect_first_step(index) is index
