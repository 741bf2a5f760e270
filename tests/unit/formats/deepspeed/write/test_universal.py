"""The universal directory: what each of DeepSpeed's loaders needs, and what it is told of their limits."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ucp_formats.deepspeed.read.universal.source import DeepSpeedUniversalFormat
from ucp_formats.deepspeed.write.universal import DeepSpeedUniversalTarget

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import Extra, StateIndex, check_cover
from ucp.core.region import Box
from ucp.core.target import TargetOptions
from ucp.core.tensor import InlineTensor
from ucp.core.topology import Topology
from ucp.errors import DestinationError, MissingStateError, TopologyError, UsageError

TAG = "global_step7"
TARGET = DeepSpeedUniversalTarget()
Make = Callable[..., Any]


def test_every_trained_parameter_has_a_folder_with_its_states_and_nothing_else(source: Make, write: Make) -> None:
    made = source()
    names = write(made, TARGET).names()
    folders = {name.split("/")[2] for name in names if name.startswith(f"{TAG}/zero/") and name.count("/") == 3}
    assert folders == {"emb", "w", "gate", "scalar", "bias"}
    assert {name for name in names if "/emb/" in name} == {
        f"{TAG}/zero/emb/{state}.pt" for state in ("fp32", "exp_avg", "exp_avg_sq", "step")
    }
    assert names - {name for name in names if name.count("/") == 3} == {
        "latest",
        "latest_universal",
        f"{TAG}/mp_rank_00_model_states.pt",
        f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt",
        f"{TAG}/zero/optimizer_state.pt",
    }


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
    with pytest.raises(DestinationError, match="expected names of parameters that can be folders"):
        TARGET.plan(made.index(), None, TargetOptions())


def test_frozen_parameters_have_no_folder_and_any_name(source: Make, write: Make) -> None:
    made = source(shapes={"w": (2, 7), "gate": (3,), "..": (2,)}, groups=[["w"], ["gate"]], frozen=[".."], buffers=[])
    module = write(made, TARGET).load(f"{TAG}/mp_rank_00_model_states.pt")["module"]
    assert np.array_equal(module[".."], made.arrays["../weight"])


def test_a_0d_parameter_has_one_dim_as_the_loader_cannot_chunk_it_otherwise(source: Make, write: Make) -> None:
    assert write(source(), TARGET).load(f"{TAG}/zero/scalar/fp32.pt")["param"].shape == (1,)


def test_steps_of_an_engine_stay_numbers(source: Make, write: Make) -> None:
    made = source(steps=[3, 3])
    made.extras = (*made.extras, Extra(name="engine", value={}))
    written = write(made, TARGET)
    assert type(written.load(f"{TAG}/zero/gate/step.pt")) is int
    assert written.load(f"{TAG}/zero/optimizer_state.pt")["optimizer_state_dict"]["state"][0] == {"step": 3}


@pytest.mark.parametrize(
    ("settings", "dtype", "told"),
    [
        ({}, np.dtype("float32"), "shares one step tensor"),
        ({"optimizer": "torch"}, np.dtype("float32"), "shares one step tensor"),
        ({"optimizer": "deepspeed"}, None, "step is written as a whole number"),
    ],
)
def test_steps_from_elsewhere_take_the_form_that_is_asked_for(
    source: Make, write: Make, settings: dict[str, str], dtype: np.dtype[Any] | None, told: str
) -> None:
    written = write(source(steps=[3, 3]), TARGET, options=TargetOptions(settings=settings))
    shared = written.load(f"{TAG}/zero/optimizer_state.pt")["optimizer_state_dict"]["state"][0]["step"]
    for step in (written.load(f"{TAG}/zero/gate/step.pt"), shared):
        assert step == 3 if dtype is None else (step.dtype, step.shape) == (dtype, ())
    assert any(told in note for note in written.plan.notes)


def test_steps_that_are_tensors_do_not_become_numbers(source: Make) -> None:
    with pytest.raises(UsageError, match=r"expected steps that are plain numbers"):
        TARGET.plan(source().index(), None, TargetOptions(settings={"optimizer": "deepspeed"}))


def test_another_optimizer_is_refused(source: Make) -> None:
    with pytest.raises(UsageError, match="expected --set optimizer=torch or optimizer=deepspeed; got 'adam'"):
        TARGET.plan(source().index(), None, TargetOptions(settings={"optimizer": "adam"}))


def test_global_state_serves_both_loaders(source: Make, write: Make) -> None:
    state = write(source(), TARGET).load(f"{TAG}/zero/optimizer_state.pt")
    assert [entry["lr"] for entry in state["param_groups"]] == [0.1, 0.2]
    assert state["ds_version"] == "0.19.8"
    assert "loss_scaler" not in state
    assert state["optimizer_state_dict"]["param_groups"] == [{"eps": 1e-8, "params": [0]}]


def test_hyperparameters_on_which_groups_agree_reach_stage_3(source: Make, write: Make) -> None:
    made = source(hypers=[{"lr": 0.5, "betas": (0.9, 0.999)}] * 2)
    written = write(made, TARGET)
    entry = written.load(f"{TAG}/zero/optimizer_state.pt")["optimizer_state_dict"]["param_groups"][0]
    assert entry == {"lr": 0.5, "betas": (0.9, 0.999), "params": [0]}
    assert not any("differ between" in note for note in written.plan.notes)


def test_model_files_hold_what_lies_nowhere_else_and_no_weights(source: Make, write: Make) -> None:
    made = source()
    written = write(made, TARGET)
    module = written.load(f"{TAG}/mp_rank_00_model_states.pt")["module"]
    assert sorted(module) == ["frozen", "mean", "void"]
    assert np.array_equal(module["frozen"], made.arrays["frozen/weight"])
    stage3 = written.load(f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert stage3["module"] == {}
    for key in ("dp_world_size", "mp_world_size", "lr_scheduler", "global_steps", "global_samples", "skipped_steps"):
        assert key in stage3 or key == "global_samples"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "leaves 2 frozen parameters and 1 buffer as the model was built"),
        (
            {"frozen": [], "shapes": {"w": (2, 7), "gate": (3,), "mean": (2,)}, "groups": [["w"], ["gate"]]},
            "leaves 1 buffer as",
        ),
        ({}, "(lr, weight_decay)"),
        ({}, "cannot load it at 4 to 1024 ranks"),
        ({}, "(numbers above 1,024 were not tried)"),
        ({}, "clone"),
        ({"states": [["exp_avg", "exp_avg_sq", "extra"]] * 2}, "stage 3 leaves out extra"),
    ],
)
def test_limits_of_deepspeed_are_told(source: Make, write: Make, changes: dict[str, object], words: str) -> None:
    assert any(words in note for note in write(source(**changes), TARGET).plan.notes)


def test_cuts_that_are_not_recorded_are_told_where_the_source_had_some(source: Make, write: Make) -> None:
    told = [
        any("how tensor-parallel ranks cut parameters is not in the files" in note for note in plan.notes)
        for plan in (write(source(topology=Topology(dp=2, tp=tp)), TARGET).plan for tp in (1, 2))
    ]
    assert told == [False, True]


PIPELINE = {"shapes": {"0.w": (5, 3), "1.b": (7,), "tied_modules.e.w": (4, 4)}, "frozen": [], "buffers": []}


@pytest.mark.parametrize(
    ("groups", "waits"),
    [([["0.w", "tied_modules.e.w"], ["1.b"]], True), ([["0.w", "1.b", "tied_modules.e.w"]], False)],
)
def test_a_pipeline_has_limits_of_its_own(source: Make, write: Make, groups: list[list[str]], waits: bool) -> None:
    hypers = [{"lr": 0.1 * number} for number in range(1, len(groups) + 1)]
    own = source(
        **PIPELINE,
        groups=groups,
        hypers=hypers,
        states=[["exp_avg"]] * len(groups),
        steps=[3.0] * len(groups),
        topology=Topology(dp=2, pp=2),
    )
    notes = write(own, TARGET).plan.notes
    assert any("in stage 1 of ZeRO, as this is a pipeline" in note for note in notes)
    assert not any("stage 3" in note for note in notes)
    assert any("hangs in the first step" in note for note in notes) == waits


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
    assert any("as this is a pipeline" in note for note in notes) is expected
    assert any("stage 3" in note for note in notes) is not expected
    assert ("pipeline" in written.load(f"{TAG}/zero/optimizer_state.pt")) is expected
    read = DeepSpeedUniversalFormat().read(written.root)
    assert [extra.value for extra in read.extras if extra.name == "pipeline"] == [True] * expected
    if not expected:
        with pytest.raises(TopologyError, match="expected a source that was a pipeline"):
            TARGET.plan(made.index(), Topology(pp=2), TargetOptions())


@pytest.mark.parametrize("step", [float("nan"), float("inf"), 2.5, 3.0])
def test_only_whole_steps_become_whole_numbers_and_are_told_of(source: Make, write: Make, step: float) -> None:
    made = source()
    index = made.index()
    value = InlineTensor(data=struct.pack("<d", step), dtype=DType.FLOAT64)
    state = StateIndex(dtype=DType.FLOAT64, global_shape=(), fragments=(Fragment(box=Box((), ()), ref=value),))
    atoms = {
        name: replace(atom, states={**atom.states, "step": state}) if "step" in atom.states else atom
        for name, atom in index.atoms.items()
    }
    made.index = lambda: replace(index, atoms=atoms)
    written = write(made, TARGET, options=TargetOptions(settings={"optimizer": "deepspeed"}))
    found = written.load(f"{TAG}/zero/gate/step.pt")
    assert (type(found), repr(float(found))) == (int if step == 3.0 else float, repr(step))
    assert any("a whole number" in line for line in written.plan.casts) is (step == 3.0)


ADAM = {"betas": (0.9, 0.99), "eps": 1e-8}
LION = {"betas": (0.9, 0.99)}
SUBSETS = [
    ([], None, ADAM, "exp_avg, exp_avg_sq, step", "", True),
    ([], 3.0, ADAM, "exp_avg, exp_avg_sq", "exp_avg, exp_avg_sq", False),
    (["exp_avg"], 3.0, ADAM, "exp_avg_sq", "exp_avg_sq", False),
    (["exp_avg_sq"], 3.0, ADAM, "exp_avg", "exp_avg", False),
    (["exp_avg"], None, ADAM, "exp_avg_sq, step", "exp_avg_sq, step", False),
    (["exp_avg", "exp_avg_sq"], None, ADAM, "step", "step", False),
    (["exp_avg", "exp_avg_sq"], 3.0, ADAM, "", "", False),
    (["exp_avg"], 3.0, LION, "exp_avg_sq", "", False),
    (["exp_avg", "exp_inf"], 3.0, ADAM, "exp_avg_sq", "", False),
    (["momentum_buffer"], None, {"momentum": 0.9}, "exp_avg, exp_avg_sq, step", "", False),
]
"""States, step, hyper-parameters; what stage 3 asks for in vain; what stages 1 and 2 do; whether all starts anew."""


@pytest.mark.parametrize(("states", "step", "hyper", "stage3", "adam", "anew"), SUBSETS)
def test_notes_are_true_for_every_subset_of_states(
    source: Make,
    write: Make,
    states: list[str],
    step: float | None,
    hyper: dict[str, object],
    stage3: str,
    adam: str,
    anew: bool,
) -> None:
    notes = write(source(states=[states, states], steps=[step, step], hypers=[hyper, hyper]), TARGET).plan.notes
    refused = [note for note in notes if note.startswith("stage 3 cannot load it")]
    assert [note.partition("not all have ")[2].partition(".")[0] for note in refused] == ([stage3] if stage3 else [])
    told = [note.split(": ")[0] for note in notes if "cannot resume" in note]
    assert told == ([f"stages 1 and 2 cannot resume the optimizer, which lacks {adam}"] if adam else [])
    assert any("starts them anew" in note for note in notes) is anew
    assert any("clone" in note for note in notes) is not bool(stage3)


def test_a_topology_is_refused_as_the_files_are_the_same_for_all(source: Make) -> None:
    with pytest.raises(UsageError, match="drop --topology"):
        TARGET.plan(source().index(), Topology(dp=4, zero=3), TargetOptions())


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
    assert any("lr of the first group" in note for note in written.plan.notes)


def test_round_robin_is_warned_of(source: Make, write: Make) -> None:
    made = source(extras=[Extra(name="ds_config", value={"zero_optimization": {"round_robin_gradients": True}})])
    assert any("wrong places" in note for note in write(made, TARGET).plan.notes)
