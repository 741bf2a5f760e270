"""The universal directory: what each of DeepSpeed's loaders needs, and what it is told of their limits."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ucp_formats.deepspeed.read.universal.source import DeepSpeedUniversalFormat
from ucp_formats.deepspeed.write.universal import DeepSpeedUniversalTarget

from ucp.core.gaps import check_cover
from ucp.core.index import Extra, StateIndex
from ucp.core.target import TargetOptions
from ucp.core.tensor import DType, InlineTensor, Tensor
from ucp.core.topology import Topology
from ucp.errors import DestinationError, MissingStateError, TopologyError, UnsupportedError, UsageError

TAG = "global_step7"
TARGET = DeepSpeedUniversalTarget()
Make = Callable[..., Any]


NESTED = {"shapes": {"a": (2, 3), "a/b": (4,), "x/y/z.w": (5,)}, "groups": [["a"], ["a/b", "x/y/z.w"]], "frozen": []}


def test_names_with_slashes_are_folders_in_folders_and_read_back(source: Make, write: Make) -> None:
    made = source(**NESTED, buffers=[])
    written = write(made, TARGET)
    for name in made.shapes:
        value = written.load(f"{TAG}/zero/{name}/exp_avg.pt")
        assert np.array_equal(value["param"], made.arrays[f"{name}/exp_avg"])
    read = DeepSpeedUniversalFormat().read(written.root)
    check_cover(read)
    assert {name: (atom.global_shape, set(atom.states)) for name, atom in read.atoms.items()} == {
        name: (shape, {"weight", "exp_avg", "exp_avg_sq", "step"}) for name, shape in made.shapes.items()
    }
    assert [group.params for group in read.groups] == [("a",), ("a/b", "x/y/z.w")]


@pytest.mark.parametrize("name", ["", ".", "..", "../../evil", "/abs", "a//b", "a\0b", "a\ud800b", "x" * 300])
def test_names_that_no_folder_can_have_are_refused_before_anything_is_written(source: Make, name: str) -> None:
    made = source(shapes={"w": (2, 7), name: (3,)}, groups=[["w"], [name]], frozen=[], buffers=[])
    with pytest.raises(DestinationError, match=re.escape(f"\n  {repr(name)[:60]}")):
        TARGET.plan(made.index(), None, TargetOptions())


def test_frozen_parameters_have_no_folder_and_any_name(source: Make, write: Make) -> None:
    made = source(shapes={"w": (2, 7), "gate": (3,), "..": (2,)}, groups=[["w"], ["gate"]], frozen=[".."], buffers=[])
    module = write(made, TARGET).load(f"{TAG}/mp_rank_00_model_states.pt")["module"]
    assert np.array_equal(module[".."], made.arrays["../weight"])


def test_a_0d_parameter_has_one_dim_as_the_loader_cannot_chunk_it_otherwise(source: Make, write: Make) -> None:
    assert write(source(), TARGET).load(f"{TAG}/zero/scalar/fp32.pt")["param"].shape == (1,)


@pytest.mark.parametrize(
    ("settings", "dtype", "told"),
    [
        ({}, np.dtype("float32"), "shares one step tensor"),
        ({"optimizer": "torch"}, np.dtype("float32"), "shares one step tensor"),
        ({"optimizer": "deepspeed"}, None, ""),
    ],
)
def test_steps_from_elsewhere_take_the_form_that_is_asked_for(
    source: Make, write: Make, settings: dict[str, str], dtype: np.dtype[Any] | None, told: str
) -> None:
    written = write(source(steps=[3, 3]), TARGET, options=TargetOptions(settings=settings))
    shared = written.load(f"{TAG}/zero/optimizer_state.pt")["optimizer_state_dict"]["state"][0]["step"]
    for step in (written.load(f"{TAG}/zero/gate/step.pt"), shared):
        assert step == 3 if dtype is None else (step.dtype, step.shape) == (dtype, ())
    assert any("shares one step tensor" in note for note in written.plan.notes) is bool(told)


@pytest.mark.parametrize(
    ("topology", "options", "error", "facts"),
    [
        (None, {"settings": {"optimizer": "adam"}}, UsageError, "--set optimizer=.*'adam'"),
        (None, {"dtypes": {"step": "float64"}}, UsageError, "--dtype step="),
        (None, {"dtypes": {"step": "float64"}, "settings": {"optimizer": "deepspeed"}}, UsageError, "--dtype step="),
        (Topology(dp=4, zero=3), {}, TopologyError, "--topology"),
    ],
)
def test_options_that_it_does_not_take(source: Make, topology, options, error, facts) -> None:
    """The files are the same for all topologies, and an optimizer counts steps in its own type."""
    with pytest.raises(error, match=facts):
        TARGET.plan(source().index(), topology, TargetOptions(**options))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "does not restore 2 frozen parameters and 1 buffer"),
        (
            {"frozen": [], "shapes": {"w": (2, 7), "gate": (3,), "mean": (2,)}, "groups": [["w"], ["gate"]]},
            "does not restore 1 buffer",
        ),
        ({}, "(lr, weight_decay)"),
        ({}, "clone"),
        ({"states": [["exp_avg", "exp_avg_sq", "extra"]] * 2}, "stage 3 leaves out extra"),
    ],
)
def test_limits_of_deepspeed_are_told(source: Make, write: Make, changes: dict[str, object], words: str) -> None:
    assert any(words in note for note in write(source(**changes), TARGET).plan.notes)


@pytest.mark.parametrize(
    ("extras", "shapes", "expected"),
    [
        ((), {"0.w": (5, 3), "1.b": (7,)}, False),  # as of an nn.Sequential
        ((Extra(name="pipeline", value=True),), {"0.w": (5, 3), "1.b": (7,)}, True),
        ((Extra(name="pipeline", value=True),), {"0.w": (5, 3), "head.b": (7,)}, False),
    ],
)
def test_a_pipeline_is_one_that_says_so_and_names_layers(
    source: Make, write: Make, extras: tuple[Extra, ...], shapes: dict[str, tuple[int, ...]], expected: bool
) -> None:
    made = source(shapes=shapes, groups=[[name] for name in shapes], frozen=[], buffers=[], extras=extras)
    written = write(made, TARGET)
    notes = written.plan.notes
    assert any("stage 3" in note for note in notes) is not expected
    assert ("pipeline" in written.load(f"{TAG}/zero/optimizer_state.pt")) is expected
    read = DeepSpeedUniversalFormat().read(written.root)
    assert [extra.value for extra in read.extras if extra.name == "pipeline"] == [True] * expected
    if not expected:
        with pytest.raises(TopologyError, match=r"pp=2\b.*: drop pp"):
            TARGET.plan(made.index(), Topology(pp=2), TargetOptions())


def with_step(made: Any, step: Tensor) -> Any:
    """The source, whose parameters have all counted these steps."""
    index, state = made.index(), StateIndex.from_tensor(step)
    atoms = {
        name: replace(atom, states={**atom.states, "step": state}) if "step" in atom.states else atom
        for name, atom in index.atoms.items()
    }
    made.index = lambda: replace(index, atoms=atoms)
    return made


@pytest.mark.parametrize("step", [float("nan"), float("inf"), 2.5, 3.0])
def test_only_whole_steps_become_whole_numbers_and_are_told_of(source: Make, write: Make, step: float) -> None:
    made = with_step(source(), InlineTensor(data=struct.pack("<d", step), dtype=DType.FLOAT64))
    written = write(made, TARGET, options=TargetOptions(settings={"optimizer": "deepspeed"}))
    found = written.load(f"{TAG}/zero/gate/step.pt")
    assert (type(found), repr(float(found))) == (int if step == 3.0 else float, repr(step))
    assert any("-> int64" in line for line in written.plan.casts) is (step == 3.0)


@pytest.mark.parametrize(("dtype", "code"), [(DType.FLOAT64, "d"), (DType.INT64, "q")])
def test_steps_that_float32_rounds_are_refused_and_written_as_numbers(
    source: Make, write: Make, dtype: DType, code: str
) -> None:
    made = with_step(source(), InlineTensor(data=struct.pack(f"<{code}", 2**24 + 1), dtype=dtype))
    with pytest.raises(UnsupportedError, match=r"emb/step = 16777217.*--set optimizer=deepspeed"):
        TARGET.plan(made.index(), None, TargetOptions())
    written = write(made, TARGET, options=TargetOptions(settings={"optimizer": "deepspeed"}))
    assert written.load(f"{TAG}/zero/gate/step.pt") == 2**24 + 1


@pytest.mark.parametrize(("states", "step", "anew"), [([], None, True), ([], 3.0, False), (["exp_avg"], 3.0, False)])
def test_an_optimizer_without_any_state_starts_anew(
    source: Make, write: Make, states: list[str], step: float | None, anew: bool
) -> None:
    notes = write(source(states=[states, states], steps=[step, step]), TARGET).plan.notes
    assert any("the source has no states of the optimizer" in note for note in notes) is anew
    assert not any("stage 3" in note for note in notes), "it says itself that it does not load them"


def test_a_loss_scale_is_carried_for_fp16_only(source: Make, write: Make) -> None:
    made = source(model_dtype=DType.FLOAT16, extras=[Extra(name="ds_config", value={"fp16": {"enabled": True}})])
    assert write(made, TARGET).load(f"{TAG}/zero/optimizer_state.pt")["loss_scaler"][0] == "DynamicLossScaler"


def test_a_parameter_that_was_never_stepped_gets_zeros(source: Make, write: Make) -> None:
    made = source()
    del made.arrays["w/exp_avg"], made.arrays["w/exp_avg_sq"]
    index = made.index()
    del index.atoms["w"].states["step"]
    made.index = lambda: index
    assert not write(made, TARGET).load(f"{TAG}/zero/w/exp_avg.pt")["param"].any()


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": [], "hypers": [], "states": [], "steps": []},
        {"shapes": {"frozen": (3, 3)}, "groups": [[]], "hypers": [{}], "states": [[]], "steps": [], "buffers": []},
    ],
)
def test_weights_alone_are_refused(source: Make, write: Make, changes: dict[str, object]) -> None:
    with pytest.raises(MissingStateError, match="zero=0"):
        write(source(**changes), TARGET)


def test_under_a_schedule_the_first_group_s_rate_is_kept_for_the_first_step(source: Make, write: Make) -> None:
    made = source(extras=[Extra(name="lr_scheduler", value={"last_batch_iteration": 3})])
    written = write(made, TARGET)
    entry = written.load(f"{TAG}/zero/optimizer_state.pt")["optimizer_state_dict"]["param_groups"][0]
    assert entry == {"eps": 1e-8, "lr": 0.1, "params": [0]}
    assert any("lr of the first" in note for note in written.plan.notes)


def test_round_robin_is_warned_of(source: Make, write: Make) -> None:
    made = source(extras=[Extra(name="ds_config", value={"zero_optimization": {"round_robin_gradients": True}})])
    assert any("wrong parameters" in note for note in write(made, TARGET).plan.notes)
