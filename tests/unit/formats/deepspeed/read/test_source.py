"""Native checkpoints of runs that never were: what is read, tolerated, noted and kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ucp_formats.deepspeed.read.source import DeepSpeedFormat

import ucp
from ucp.core.gaps import check_cover
from ucp.core.index import Index
from ucp.core.tensor import DType, InlineTensor
from ucp.errors import MalformedError, MissingFileError, MissingStateError, UnsupportedError

MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def read(path: Path) -> Index:
    index = DeepSpeedFormat().read(path)
    check_cover(index)
    return index


def inner(root):
    """The torch optimizer's state_dict in an optimizer file of any stage."""
    saved = root["optimizer_state_dict"]
    return saved.get("base_optimizer_state") or saved["optimizer_state_dict"]


def extras(index: Index) -> dict[tuple[str, int | None], object]:
    return {(extra.name, extra.rank): extra.value for extra in index.extras}


def test_files_that_fast_persist_split(tmp_path: Path, fake_run) -> None:
    run = fake_run(3, 2, dtype=torch.float32)
    path = run.save(tmp_path)
    tag = path / "global_step7"
    for file in list(tag.iterdir()):
        data = file.read_bytes()
        cut = len(data) // 3
        for part, piece in enumerate((data[:cut], data[cut : 2 * cut], data[2 * cut :])):
            (tag / f"{file.name}-{part}.3").write_bytes(piece)
        file.unlink()
    index = read(path)
    assert len(index.files) == 12
    assert {Path(file.path).name for file in index.files} == {file.name for file in tag.iterdir()}
    torch.testing.assert_close(ucp.open(path).read("b.weight", "exp_avg"), 2 * run.weights["b.weight"])


@pytest.mark.parametrize("stage", [1, 3])
def test_files_from_before_the_zip_container(tmp_path: Path, fake_run, stage: int) -> None:
    path = fake_run(stage, 2, dtype=torch.float32).save(tmp_path, legacy=True)
    index = read(path)
    assert index.records == ()
    assert float(ucp.open(path).read("a.weight", "weight")[2, 4]) == 15


# ---- step, scalars, states that are missing ----


@pytest.mark.parametrize("stage", [1, 3])
def test_a_python_step_is_kept_as_a_whole_number(tmp_path: Path, fake_run, stage: int) -> None:
    run = fake_run(stage, 2)
    for root in run.optimizers:
        for state in inner(root)["state"].values():
            state["step"] = 7
    step = read(run.save(tmp_path)).atoms["b.bias"].states["step"]
    (piece,) = step.fragments
    assert piece.ref == InlineTensor(data=(7).to_bytes(8, "little"), dtype=DType.INT64)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_stands_in_the_group_only(tmp_path: Path, fake_run, stage: int) -> None:
    run = fake_run(stage, 2)
    for root in run.optimizers:
        for state in inner(root)["state"].values():
            del state["step"]
        for group in inner(root)["param_groups"]:
            group["step"] = 7
    index = read(run.save(tmp_path))
    assert float(ucp.open(tmp_path).read("a.bias", "step")) == 7
    assert index.groups[0].hyper["step"] == 7
    assert any("step of group 0 is taken from the parameter group" in note for note in index.notes)


def test_a_state_that_is_none_is_named_as_dropped(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    for root in run.optimizers:
        inner(root)["state"][0]["momentum_buffer"] = None
    assert "group 0: state momentum_buffer is None everywhere" in read(run.save(tmp_path)).dropped


def test_a_state_that_is_no_tensor_is_an_extra(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    for root in run.optimizers:
        inner(root)["state"][0]["history"] = ["a"]
    assert extras(read(run.save(tmp_path)))["optimizer_state/group 0/history", None] == ["a"]


def test_states_that_cannot_be_given_to_parameters_are_kept_and_named(tmp_path: Path, fake_run) -> None:
    """Eight-bit optimizers have such; all else is read, and only what needs them is refused."""
    run = fake_run(1, 2)
    for rank, root in enumerate(run.optimizers):
        inner(root)["state"][1]["absmax1"] = torch.full((3,), float(rank))
        inner(root)["state"][1]["qmap1"] = torch.zeros(16, 16)
        inner(root)["state"][1]["history"] = ["a"]
    index = read(run.save(tmp_path / "run"))
    told = "\n".join(index.notes)
    assert re.search(r"(?s)group 1 \(a.bias, b.bias, ...\): state absmax1.*state qmap1.*state history is", told)
    assert [name for name in index.lost if "weight" in name] == []
    assert list(index.atoms["a.bias"].states) == ["weight", "step", "exp_avg", "exp_avg_sq"]
    kept = extras(index)
    assert kept["optimizer_state/group 1/qmap1", None].shape == (16, 16)
    assert {rank for name, rank in kept if name.endswith("absmax1")} == {None, 1}

    for number in (0, 1, 3):
        with pytest.raises(MissingStateError, match=r"(?s)absmax1.*a\.bias"):
            ucp.plan(tmp_path / "run", to="deepspeed", topology=f"dp=2,zero={number}")
    ucp.convert(tmp_path / "run", tmp_path / "atoms", workers=1)
    with pytest.raises(MissingStateError, match="absmax1"):
        ucp.plan(tmp_path / "atoms", to="deepspeed-universal")
    ucp.convert(tmp_path / "atoms", tmp_path / "out", to="deepspeed", topology="dp=1,zero=1", include=["*/weight"])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_number_in_a_tensor_is_a_count(tmp_path: Path, fake_run, stage: int) -> None:
    run = fake_run(stage, 2)
    holders = [inner(root)["state"] for root in run.optimizers] or [run.models[0]["optimizer"]["state"]]
    for states in holders:
        for state in states.values():
            state |= {"count": torch.full((1,), 7.0), "grid": torch.ones(1, 1), "warm": True, "seen": 1 << 70}
    index = read(run.save(tmp_path / "run"))
    found = index.atoms["a.weight"].states
    assert [found[name].global_shape for name in ("count", "grid", "warm")] == [(1,), (1, 1), ()]
    assert "seen" not in found  # past any integer of a tensor
    assert any(name.startswith("optimizer_state/") and name.endswith("seen") for name, _ in extras(index))


def to_half(state) -> None:
    state["exp_avg"] = state["exp_avg"].bfloat16()


@pytest.mark.parametrize(
    ("stage", "change", "facts"),
    [
        (1, lambda state: state.update(step=7), r"\bstep .*group 0"),
        (3, to_half, "exp_avg .*sub-group 0"),
        (1, lambda state: state.pop("exp_avg"), r"rank_1_mp_rank_00_optim_states\.pt: group 0 .*exp_avg"),
    ],
    ids=["number", "type", "lacking"],
)
def test_a_state_that_one_rank_has_otherwise(tmp_path: Path, fake_run, stage: int, change, facts: str) -> None:
    run = fake_run(stage, 2)
    change(inner(run.optimizers[1])["state"][0])
    with pytest.raises(MalformedError, match=facts):
        read(run.save(tmp_path))


# ---- the module ----


def test_a_wrong_record_of_a_tie_is_noted(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    run.models[0]["shared_params"] = {"frozen": "a.weight", "b.bias": "a.bias"}
    index = read(run.save(tmp_path))
    assert index.aliases == {"head": "a.weight"}
    assert any("ties frozen to a.weight, but their shapes differ" in note for note in index.notes)
    assert {"frozen", "b.bias"} <= index.atoms.keys()


def test_what_a_module_keeps_beside_tensors(tmp_path: Path, fake_run) -> None:
    run = fake_run(3, 2)
    for rank, root in enumerate(run.models):
        root["module"]["a._extra_state"] = torch.zeros(3, dtype=torch.uint8)
        root["module"]["a.note"] = f"of rank {rank}"
    found = extras(read(run.save(tmp_path)))
    assert found["module/a._extra_state", None].shape == (3,)
    assert found["module/a.note", None] == "of rank 0"
    assert found["module/a.note", 1] == "of rank 1"


@pytest.mark.parametrize(
    ("name", "value", "error", "facts"),
    [
        ("language_model", {"a": torch.zeros(2)}, UnsupportedError, "'language_model'"),
        ("b.weight", torch.zeros(2, 4), MalformedError, r"b\.weight .*\[4, 2\].*\[2, 4\]"),
    ],
    ids=["nested", "shape"],
)
def test_a_module_that_is_nested_or_that_param_shapes_contradicts(
    tmp_path: Path, fake_run, name: str, value: object, error: type, facts: str
) -> None:
    run = fake_run(1, 2)
    run.models[0]["module"][name] = value
    with pytest.raises(error, match=facts):
        read(run.save(tmp_path))


def test_trained_parameters_that_the_module_lacks_come_last(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    del run.models[0]["module"]["a.weight"], run.models[0]["module"]["head"]
    index = read(run.save(tmp_path))
    assert list(index.atoms)[-1] == "a.weight"
    assert index.atoms["a.weight"].model_dtype is DType.BFLOAT16
    assert index.aliases == {"head": "a.weight"}


@pytest.mark.parametrize("same", [True, False])
def test_buffers_of_other_ranks(tmp_path: Path, fake_run, same: bool) -> None:
    run = fake_run(3, 3)
    if not same:
        run.models[2]["module"]["mean"] = torch.ones(2)
    index = read(run.save(tmp_path))
    assert float(ucp.open(tmp_path).read("mean", "weight")[0]) == 0.5
    assert [piece.replica for piece in index.atoms["mean"].states["weight"].fragments] == [0]
    own = [(extra.name, extra.rank) for extra in index.extras if extra.name.startswith("buffer/")]
    assert own == ([] if same else [("buffer/mean", 2)])
    assert any("buffer mean of rank 2 differs" in note for note in index.notes) is not same
    assert any("buffers" in note and "mean" in note for note in ucp.verify(tmp_path).notes) is not same


def test_names_without_data_are_named_as_dropped(tmp_path: Path, fake_run) -> None:
    run = fake_run(3, 2)
    for root in run.models:
        root["frozen_param_shapes"] = root["frozen_param_fragments"] = None
    index = read(run.save(tmp_path))
    assert "frozen" not in index.atoms
    assert any(line.startswith("frozen: the checkpoint holds only its name") for line in index.dropped)
    assert any("exclude_frozen_parameters" in note for note in index.notes)


def test_quantised_frozen_weights_are_refused(tmp_path: Path, fake_run) -> None:
    run = fake_run(3, 2)
    for root in run.models:
        root["frozen_param_fragments"]["frozen"] = torch.zeros(4, dtype=torch.int8)
    with pytest.raises(UnsupportedError, match=r"frozen .*int8"):
        read(run.save(tmp_path))


# ---- extras ----


def test_nothing_is_lost(tmp_path: Path, fake_run) -> None:
    run = fake_run(2, 2)
    model = run.models[0]
    model |= {"epoch": 3, "rng": torch.arange(4), "lr_scheduler": {"t": 1}, "universal_checkpoint_info": {"v": 0.4}}
    model["csr_tensor_module_names"] = ["emb"]
    for root in run.optimizers:
        root["optimizer_state_dict"]["from_the_future"] = 1
        root["also_from_the_future"] = 2
    found = extras(read(run.save(tmp_path)))
    assert found["client_state", None]["epoch"] == 3
    assert found["client_state", None]["rng"].shape == (4,)
    assert found["lr_scheduler", None] == {"t": 1}
    assert found["universal_checkpoint_info", None] == {"v": 0.4}
    assert found["sparse_tensor_module_names", None] == ["emb"]
    assert found["optimizer", None]["from_the_future"] == 1
    assert found["optimizer_file", None] == {"also_from_the_future": 2}
    assert found["engine", None] == {
        "global_steps": 7, "global_samples": 70, "skipped_steps": 0, "dp_world_size": 2, "mp_world_size": 1,
        "ds_version": "0.19.8 ",
    }  # fmt: skip


# ---- lost model-states files under ZeRO-3 (DeepSpeed issue 7546) ----


def test_lost_model_states_of_other_ranks_are_tolerated(tmp_path: Path, fake_run) -> None:
    run = fake_run(3, 4)
    for root in run.models:
        root["frozen_param_shapes"].clear()
        root["frozen_param_fragments"].clear()
        del root["module"]["frozen"]
    for rank in (1, 3):
        del run.files[MODEL.format(rank)]
    index = read(run.save(tmp_path))
    assert any("no model-states file of rank 1, 3" in note for note in index.notes)


def test_lost_model_states_with_frozen_shards_are_missing(tmp_path: Path, fake_run) -> None:
    run = fake_run(3, 4)
    for rank in (1, 3):
        del run.files[MODEL.format(rank)]
    with pytest.raises(MissingFileError, match=r"(?s)2 model-states files.*rank_1.*elements 2:4 of frozen.*rank_3"):
        read(run.save(tmp_path))
