"""Native DeepSpeed files: keys, order, padding and dtypes, stage by stage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ucp_formats.deepspeed.write.target import DeepSpeedTarget

from ucp.core.index import Extra, Fragment, Index, LostStates, StateIndex
from ucp.core.region import Box
from ucp.core.target import TargetOptions
from ucp.core.tensor import DType, InlineTensor
from ucp.core.topology import Topology
from ucp.errors import MissingStateError, TopologyError, UnsupportedError, UsageError
from ucp.io.pickle.values import GlobalName, Stub

TAG = "global_step7"
TARGET = DeepSpeedTarget()
Make = Callable[..., Any]


def optim(rank: int, prefix: str = "") -> str:
    return f"{TAG}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def config(**sections: object) -> list[Extra]:
    return [Extra(name="ds_config", value=sections)]


def flat(source: Any, names: list[str], state: str) -> list[float]:
    return [float(x) for name in names for x in source.arrays[f"{name}/{state}"].reshape(-1)]


def test_bf16_optimizer_of_stage_1_knows_no_reordering(source: Make, write: Make) -> None:
    sections = {
        "zero_optimization": {"round_robin_gradients": True, "parameter_alignment": True},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    made = source(extras=config(**sections), model_dtype=DType.BFLOAT16)
    written = write(made, TARGET, Topology(dp=2, zero=1))
    assert written.load(optim(0, "bf16_"))["optimizer_state_dict"]["param_alignment_paddings"] == [[0, 0], [0, 0, 0]]
    shapes = written.load(f"{TAG}/mp_rank_00_model_states.pt")["param_shapes"]
    assert list(shapes[1]) == ["gate", "scalar", "bias"]


def test_without_frozen_parameters_fragments_are_none_as_the_loader_skips_them_then(source: Make, write: Make) -> None:
    made = source(
        shapes={"w": (2, 2)}, groups=[["w"]], hypers=[{}], states=[["exp_avg"]], steps=[1], frozen=[], buffers=[]
    )
    model = write(made, TARGET, Topology(dp=1, zero=2)).load(f"{TAG}/mp_rank_00_model_states.pt")
    assert model["frozen_param_fragments"] is None


def test_an_empty_parameter_that_could_be_in_several_groups_is_refused_at_stage_0(source: Make, write: Make) -> None:
    made = source(groups=[["emb", "gate"], ["w", "scalar", "bias"]])
    with pytest.raises(UnsupportedError, match=r"void \[0, 4\]"):
        write(made, TARGET, Topology(dp=1, zero=0))


@pytest.mark.parametrize(
    ("extras", "hyper"),
    [
        (config(optimizer={"type": "AdamW", "params": {"lr": 1.0}}), {}),
        ([], {"bias_correction": True}),
    ],
)
def test_stage_0_of_fused_adam_is_flat_without_padding(
    source: Make, write: Make, extras: list[Extra], hyper: dict[str, object]
) -> None:
    made = source(model_dtype=DType.BFLOAT16, extras=extras, hypers=[hyper, hyper])
    optimizer = write(made, TARGET, Topology(dp=2, zero=0)).load(f"{TAG}/mp_rank_00_model_states.pt")["optimizer"]
    assert optimizer["fp32_groups_flat"][1].tolist() == flat(made, ["gate", "scalar", "bias"], "weight")
    assert optimizer["optimizer_state_dict"]["state"][0]["exp_avg"].tolist() == flat(made, ["emb", "w"], "exp_avg")


@pytest.mark.parametrize("own", ["amsgrad", "foreach", "maximize"])
def test_bias_correction_that_torch_s_adam_has_kept_is_none_of_fused_adam(source: Make, write: Make, own: str) -> None:
    hyper = {"bias_correction": True, own: None}
    made = source(model_dtype=DType.BFLOAT16, hypers=[hyper, hyper])
    optimizer = write(made, TARGET, Topology(dp=2, zero=0)).load(f"{TAG}/mp_rank_00_model_states.pt")["optimizer"]
    assert "fp32_groups_flat" not in optimizer
    assert [len(masters) for masters in optimizer["fp32_groups"]] == [2, 3]


def test_a_parameter_that_was_never_stepped_has_zeros_in_a_flat_group(source: Make, write: Make) -> None:
    made = source()
    del made.arrays["w/exp_avg"], made.arrays["w/exp_avg_sq"]
    index = made.index()
    del index.atoms["w"].states["step"]
    made.index = lambda: index
    written = write(made, TARGET, Topology(dp=1, zero=1))
    share = written.load(optim(0))["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
    assert share[:15].tolist() == flat(made, ["emb"], "exp_avg")
    assert not share[15:].any()
    assert (
        "1 parameter lacks states that others of their group have (w, ...): these are written as zeros"
        in written.plan.notes[0]
    )
    assert written.plan.zeros == {"w": {"exp_avg", "exp_avg_sq", "step"}}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_was_stepped_and_lost_its_moments_is_refused(source: Make, stage: int) -> None:
    made = source()
    del made.arrays["w/exp_avg"], made.arrays["w/exp_avg_sq"]
    with pytest.raises(MissingStateError, match=r"w: exp_avg, exp_avg_sq, .*step\n.*--zero-moments keep"):
        TARGET.plan(made.index(), Topology(dp=1, zero=stage), TargetOptions())
    plan = TARGET.plan(made.index(), Topology(dp=1, zero=stage), TargetOptions(keeps_zeros=True))
    assert plan.zeros == {"w": {"exp_avg", "exp_avg_sq"}}


FUSED = {"model_dtype": DType.BFLOAT16, "extras": [Extra(name="ds_config", value={"optimizer": {"type": "AdamW"}})]}
CHOSEN = {"w": LostStates(reason="all of these parameters, left out by --exclude", is_chosen=True)}


@pytest.mark.parametrize(
    ("stage", "changes", "flat"), [(0, {}, False), (0, FUSED, True), (1, {}, True), (2, {}, True), (3, FUSED, True)]
)
def test_all_states_of_a_parameter_that_the_user_left_out_are_no_zeros_in_a_flat_group(
    source: Make, stage: int, changes: dict[str, object], flat: bool
) -> None:
    """Where each parameter has its own, torch's optimizers start it anew."""
    index = replace(without_states(source(**changes), "w"), lost=CHOSEN)
    topology = Topology(dp=1, zero=stage)
    if flat:
        with pytest.raises(MissingStateError, match=r"--exclude:\n  w\n.*--zero-moments keep"):
            TARGET.plan(index, topology, TargetOptions())
    plan = TARGET.plan(index, topology, TargetOptions(keeps_zeros=flat))
    assert plan.zeros == ({"w": {"exp_avg", "exp_avg_sq", "step"}} if flat else {})


def test_nor_is_one_state_of_it_nor_those_of_a_group_that_has_none(source: Make) -> None:
    index = replace(source().index(), lost=CHOSEN)
    del index.atoms["w"].states["step"]
    with pytest.raises(MissingStateError, match=r"--exclude:\n  w"):
        TARGET.plan(index, Topology(dp=1, zero=1), TargetOptions())
    for atom in ("emb", "w", "void"):
        for state in index.atoms[atom].states.keys() - {"weight"}:
            del index.atoms[atom].states[state]
    plan = TARGET.plan(index, Topology(dp=1, zero=1), TargetOptions())
    assert plan.zeros == {}
    assert any("no states of groups 0 of the optimizer" in note for note in plan.notes)


def test_stage_0_of_fused_adam_is_as_flat_as_other_stages(source: Make, write: Make) -> None:
    made = source(**FUSED)
    index = made.index()
    del index.atoms["w"].states["exp_avg"]
    with pytest.raises(MissingStateError, match=r"w: exp_avg, .*exp_avg_sq, step"):
        TARGET.plan(index, Topology(dp=1, zero=0), TargetOptions())
    plan = TARGET.plan(index, Topology(dp=1, zero=0), TargetOptions(keeps_zeros=True))
    assert plan.zeros == {"w": {"exp_avg"}}
    assert not any("KeyError" in note for note in plan.notes)
    made.index = lambda: without_states(made, "w", index)
    optimizer = write(made, TARGET, Topology(dp=1, zero=0)).load(f"{TAG}/mp_rank_00_model_states.pt")["optimizer"]
    first = optimizer["optimizer_state_dict"]["state"][0]["exp_avg"]
    assert first[:15].tolist() == flat(made, ["emb"], "exp_avg")
    assert not first[15:].any()


def without_states(made: Make, name: str, index: Index | None = None) -> Index:
    """The index of a source, with the weight alone of parameter `name`."""
    index = index or made.index()
    for state in index.atoms[name].states.keys() - {"weight"}:
        del index.atoms[name].states[state]
    return index


def test_different_steps_in_a_flat_group_are_refused(source: Make, write: Make) -> None:
    made = source()
    index = made.index()
    index.atoms["w"].states["step"] = made.step(4.0)
    made.index = lambda: index
    with pytest.raises(UnsupportedError, match=r"(?s)emb: 3.*w: 4"):
        write(made, TARGET, Topology(dp=1, zero=1))


def test_an_optimizer_without_states_is_written_without_states(source: Make, write: Make) -> None:
    made = source(states=[[], []], steps=[])
    file = write(made, TARGET, Topology(dp=2, zero=1)).load(optim(1))["optimizer_state_dict"]
    assert file["base_optimizer_state"]["state"] == {}
    assert [entry["lr"] for entry in file["base_optimizer_state"]["param_groups"]] == [0.1, 0.2]


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": [], "hypers": [], "states": [], "steps": []},
        {"shapes": {"frozen": (3, 3)}, "groups": [[]], "hypers": [{}], "states": [[]], "steps": [], "buffers": []},
    ],
)
def test_weights_alone_make_a_stage_0_model_file_only(source: Make, write: Make, changes: dict[str, object]) -> None:
    made = source(**changes)
    written = write(made, TARGET, Topology(dp=2, zero=0))
    assert written.load(f"{TAG}/mp_rank_00_model_states.pt")["optimizer"] is None
    assert "load_module_only" in written.plan.notes[-1]
    with pytest.raises(MissingStateError, match="zero=0"):
        write(made, TARGET, Topology(dp=2, zero=1))


def test_stage_0_names_its_parameters_in_param_shapes_not_in_the_groups(source: Make, write: Make) -> None:
    for changes, names in (
        ({}, [["emb", "w", "void"], ["gate", "scalar", "bias"]]),
        ({"model_dtype": DType.BFLOAT16}, [["emb", "w"], ["gate", "scalar", "bias"]]),
    ):
        made = source(**changes)
        state = write(made, TARGET, Topology(dp=2, zero=0)).load(f"{TAG}/mp_rank_00_model_states.pt")
        assert [list(group) for group in state["param_shapes"]] == names
        assert state["param_shapes"][0]["emb"] == (5, 3)
        optimizer = state["optimizer"]
        groups = optimizer.get("optimizer_state_dict", optimizer)["param_groups"]
        assert [sorted(group) for group in groups] == [["eps", "lr", "params", "weight_decay"]] * 2


def test_stage_3_keeps_the_shape_of_an_empty_parameter_that_nothing_frozen_stands_beside(
    source: Make, write: Make
) -> None:
    """Then `frozen_param_shapes` stays None: the source may have been saved without its frozen parameters."""
    alone = source(shapes={"w": (2, 2), "void": (0, 4)}, groups=[["w"]], hypers=[{}], states=[[]], steps=[], buffers=[])
    for rank in range(2):
        path = f"{TAG}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        model = write(alone, TARGET, Topology(dp=2, zero=3)).load(path)
        assert model["frozen_param_shapes"] is model["frozen_param_fragments"] is None
        assert model["empty_param_shapes"] == {"void": (0, 4)}
        assert model["module"]["void"].shape == (0,), "stage 3 loads placeholders"
        assert "empty_param_shapes" not in write(source(), TARGET, Topology(dp=2, zero=3)).load(path)


def test_one_group_without_states_is_named(source: Make, write: Make) -> None:
    made = source(states=[["momentum_buffer"], []], steps=[])
    notes = write(made, TARGET, Topology(dp=2, zero=2)).plan.notes
    assert any("no states of groups 1 of the optimizer" in note for note in notes)


def test_a_trained_parameter_outside_all_groups_is_refused(source: Make, write: Make) -> None:
    with pytest.raises(MissingStateError, match="bias"):
        write(source(groups=[["emb", "w"], ["gate", "scalar"]]), TARGET, Topology(dp=2, zero=1))


@pytest.mark.parametrize(
    ("topology", "error", "facts"),
    [
        (Topology(dp=2), TopologyError, "ZeRO stage .*--topology"),
        (Topology(dp=2, tp=2, zero=1), TopologyError, "8 tensors .* 2 tensor-parallel(?s:.*) tp=1$"),
    ],
)
def test_topologies_it_cannot_write_are_refused(source: Make, write: Make, topology: Topology, error, facts) -> None:
    with pytest.raises(error, match=facts):
        write(source(), TARGET, topology)


def test_compression_is_refused(source: Make, write: Make) -> None:
    with pytest.raises(UsageError, match="--compress"):
        write(source(), TARGET, Topology(dp=1, zero=1), TargetOptions(compress=True))


def test_without_a_known_gradient_clipping_the_engine_keeps_its_own(source: Make, write: Make) -> None:
    bare = write(source(), TARGET, Topology(dp=1, zero=1)).load(optim(0))["optimizer_state_dict"]
    assert "clip_grad" not in bare
    known = source(extras=config(gradient_clipping=1.5))
    assert write(known, TARGET, Topology(dp=1, zero=2)).load(optim(0))["optimizer_state_dict"]["clip_grad"] == 1.5


SCALER = Stub(
    GlobalName("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    state={
        "cur_scale": 512.0,
        "dynamic": True,
        "cur_iter": 5,
        "last_overflow_iter": 3,
        "scale_factor": 2.0,
        "scale_window": 100,
        "cur_hysteresis": 1,
    },
    has_state=True,
)
FP16 = {"fp16": {"enabled": True, "hysteresis": 3, "min_loss_scale": 2}}


def test_a_loss_scaler_goes_from_an_object_to_numbers(source: Make, write: Make) -> None:
    made = source(model_dtype=DType.FLOAT16, extras=[Extra(name="loss_scaler", value=SCALER), *config(**FP16)])
    optimizer = write(made, TARGET, Topology(dp=1, zero=0)).load(f"{TAG}/mp_rank_00_model_states.pt")["optimizer"]
    numbers = {key: optimizer[key] for key in ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter")}
    assert numbers == {"dynamic_loss_scale": True, "cur_scale": 512.0, "cur_iter": 5, "last_overflow_iter": 3}
    kept = write(made, TARGET, Topology(dp=1, zero=2)).load(optim(0))["optimizer_state_dict"]
    assert kept["loss_scaler"] == ("DynamicLossScaler", SCALER.state)
    assert kept["dynamic_loss_scale"] is True


def test_a_loss_scaler_goes_from_numbers_to_an_object(source: Make, write: Make) -> None:
    numbers = {
        "dynamic_loss_scale": True,
        "cur_scale": 64.0,
        "cur_iter": 9,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 50,
    }
    made = source(model_dtype=DType.FLOAT16, extras=[Extra(name="loss_scaler", value=numbers), *config(**FP16)])
    name, state = write(made, TARGET, Topology(dp=1, zero=3)).load(optim(0))["optimizer_state_dict"]["loss_scaler"]
    assert name == "DynamicLossScaler"
    assert (state["cur_scale"], state["cur_iter"], state["scale_window"]) == (64.0, 9, 50)
    assert (state["delayed_shift"], state["min_scale"], state["consecutive_hysteresis"]) == (3, 2, False)
    assert state["dtype"] == GlobalName("torch", "float16")


MUON = [{"use_muon": True, "momentum": 0.95}, {"use_muon": False}]


@pytest.mark.parametrize(
    "sections",
    [
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ],
)
def test_muon_on_the_cpu_and_in_bf16_optimizer_shares_its_momentum(
    source: Make, write: Make, sections: dict[str, object]
) -> None:
    made = source(states=[["momentum_buffer"], []], hypers=MUON, steps=[], extras=config(**sections))
    prefix = "bf16_" if "bf16" in sections else ""
    file = write(made, TARGET, Topology(dp=3, zero=1)).load(optim(0, prefix))["optimizer_state_dict"]
    assert file["base_optimizer_state"]["state"][0]["momentum_buffer"].size == 10


def test_buffers_of_single_ranks_go_to_the_files_of_those_ranks(source: Make, write: Make) -> None:
    made = source()
    ref = made.index().atoms["mean"].states["weight"].fragments[0].ref
    other = made.index().atoms["bias"].states["weight"].fragments[0].ref
    own = replace(other, shape=ref.shape)
    made = source(extras=[Extra(name="buffer/mean", value=own, rank=1)], topology=Topology(dp=2, zero=3))
    written = write(made, TARGET, Topology(dp=2, zero=3))
    means = [written.load(f"{TAG}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt")["module"]["mean"] for rank in (0, 1)]
    assert means[0].tolist() == flat(made, ["mean"], "weight")
    assert means[1].tolist() == flat(made, ["bias"], "weight")[:2]
    narrowed = write(made, TARGET, Topology(dp=2, zero=1))
    assert any("buffer/mean" in line for line in narrowed.plan.dropped)


def test_a_static_loss_scale_stays_static(source: Make, write: Make) -> None:
    made = source(model_dtype=DType.FLOAT16, extras=config(fp16={"enabled": True, "loss_scale": 128}))
    file = write(made, TARGET, Topology(dp=1, zero=2)).load(optim(0))["optimizer_state_dict"]
    assert file["loss_scaler"] == ("LossScaler", {"cur_scale": 128.0, "dynamic": False})
    assert file["dynamic_loss_scale"] is False


def test_a_state_of_another_shape_cannot_lie_in_a_flat_buffer(source: Make, write: Make) -> None:
    made = source()
    made.arrays["emb/exp_avg"] = made.arrays["emb/exp_avg"][:, 0].copy()
    with pytest.raises(UnsupportedError, match=r"emb/exp_avg: \[5\]"):
        write(made, TARGET, Topology(dp=1, zero=1))


def test_a_tensor_beside_it_stays_one(source: Make, write: Make) -> None:
    made = source()
    index = made.index()
    ref = InlineTensor(data=struct.pack("<d", 3.0), dtype=DType.FLOAT64)
    step = StateIndex(dtype=DType.FLOAT64, global_shape=(), fragments=(Fragment(box=Box((), ()), ref=ref),))
    for name in ("emb", "w"):
        index.atoms[name].states["step"] = step
    made.index = lambda: index
    written = write(made, TARGET, Topology(dp=1, zero=1))
    state = written.load(optim(0))["optimizer_state_dict"]["base_optimizer_state"]["state"]
    assert type(state[0]["step"]) is int
    assert (state[1]["step"].dtype, state[1]["step"].shape) == (np.dtype("<f4"), ())
    assert written.plan.casts == ("step: float64 -> int64 in 2 parameters",)


def test_muon_keeps_its_momentum_whole_for_every_parameter_that_a_share_touches(source: Make, write: Make) -> None:
    made = source(states=[["momentum_buffer"], ["exp_avg", "exp_avg_sq"]], hypers=MUON, steps=[None, 3])
    written = write(made, TARGET, Topology(dp=3, zero=2))
    touched = [["emb"], ["emb", "w"], ["w"]]
    for rank, names in enumerate(touched):
        state = written.load(optim(rank))["optimizer_state_dict"]["base_optimizer_state"]["state"]
        assert state[0]["momentum_buffer"].tolist() == flat(made, names, "momentum_buffer")
        assert state[1]["exp_avg"].size == 4
