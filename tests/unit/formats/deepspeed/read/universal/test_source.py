"""Universal checkpoints: DeepSpeed's two forms, ucp's own, and what can be wrong with them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from ucp_formats.deepspeed.read.universal.source import DeepSpeedUniversalFormat

from ucp.core.gaps import check_cover
from ucp.core.index import Index
from ucp.core.tensor import DType
from ucp.errors import MalformedError, MissingFileError, UnsupportedError

FIXTURES = Path(__file__).parents[6] / "fixtures" / "deepspeed"


def read(path: Path) -> Index:
    index = DeepSpeedUniversalFormat().read(path)
    check_cover(index)
    return index


def save_universal(run, folder: Path, *, form: str = "dict") -> Path:
    """What DeepSpeed's converter makes of a run (`form` "dict": ZeRO up to 2; "flat": ZeRO-3)."""
    tag = folder / "step7_universal"
    for name, weight in run.weights.items():
        if name == "frozen":
            continue
        states = {"fp32": weight, "exp_avg": 2 * weight, "exp_avg_sq": 3 * weight}
        (tag / "zero" / name).mkdir(parents=True)
        for state, tensor in states.items():
            value = {"cat_dim": 0, "param": tensor} if form == "dict" else tensor.flatten()
            torch.save(value, tag / "zero" / name / f"{state}.pt")
        if form == "dict":
            torch.save(7, tag / "zero" / name / "step.pt")
    for name, root in run.files.items():
        if "model_states" in name:
            torch.save(root, tag / name)
    shared = dict(run.optimizers[0]["optimizer_state_dict"])
    inner = shared.pop("base_optimizer_state", None) or shared["optimizer_state_dict"]
    shared.pop("single_partition_of_fp32_groups", None)
    torch.save({**shared, "param_groups": inner["param_groups"]}, tag / "zero" / "optimizer_state.pt")
    (folder / "latest_universal").write_text(tag.name)
    return folder


def test_casts_of_frozen_weights_and_buffers_are_not_taken(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    path = save_universal(run, tmp_path)
    zero = path / "step7_universal" / "zero"
    for name in ("frozen", "mean", "head"):
        (zero / name).mkdir()
        torch.save({"param": run.models[0]["module"][name].float()}, zero / name / "fp32.pt")
    index = read(path)
    assert index.atoms["frozen"].states["weight"].dtype is DType.BFLOAT16
    assert [line.partition(":")[0] for line in index.dropped if line.startswith("zero/")] == [
        "zero/frozen/", "zero/head/", "zero/mean/",
    ]  # fmt: skip


def test_vocabulary_padding_that_was_cut_off(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    path = save_universal(run, tmp_path)
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        file = path / "step7_universal" / "zero" / "a.weight" / f"{state}.pt"
        torch.save({"param": torch.load(file)["param"][:2], "cat_dim": 0, "vocab_tensor": True}, file)
    atom = read(path).atoms["a.weight"]
    assert atom.global_shape == (2, 5)
    assert all(piece.replica == 0 for piece in atom.states["weight"].fragments), "the padded module is no copy"


def test_flat_tensors_without_a_shape_are_refused(tmp_path: Path, fake_run) -> None:
    run = fake_run(3, 2)
    path = save_universal(run, tmp_path, form="flat")
    torch.save(torch.zeros(99), path / "step7_universal" / "zero" / "b.bias" / "exp_avg.pt")
    with pytest.raises(MalformedError, match=r"zero/b\.bias/exp_avg\.pt: .*\[4\]"):
        read(path)


def test_everything_wrong_at_once(tmp_path: Path, fake_run) -> None:
    path = save_universal(fake_run(1, 2), tmp_path)
    zero = path / "step7_universal" / "zero"
    (zero / "a.bias" / "fp32.pt").unlink()
    (zero / "b.bias" / "exp_avg.pt").write_bytes(b"PK")
    (zero / "optimizer_state.pt").unlink()
    with pytest.raises(MalformedError) as caught:
        read(path)
    message = str(caught.value)
    for part in ("missing: zero/a.bias/fp32.pt", "zero/b.bias/exp_avg.pt: ", "missing: optimizer_state.pt"):
        assert part in message


@pytest.mark.parametrize(("aligned", "refused"), [(False, True), (True, False)])
def test_what_deepspeeds_converter_swaps_is_refused(tmp_path: Path, fake_run, aligned: bool, refused: bool) -> None:
    run = fake_run(1, 2, groups=({"a": (4,), "b": (4,), "c": (4,)},))
    run.models[0]["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
    saved = run.optimizers[0]["optimizer_state_dict"]
    saved["param_alignment_paddings"] = [[4, 4, 0]] if aligned else [[0, 0, 0]]
    path = save_universal(run, tmp_path)
    if refused:
        with pytest.raises(UnsupportedError, match="round_robin_gradients"):
            read(path)
    else:
        assert read(path).groups[0].params == ("a", "c", "b")


def test_strays_are_noted(tmp_path: Path, fake_run) -> None:
    path = save_universal(fake_run(1, 2), tmp_path)
    (path / "step7_universal" / "zero" / "a.bias" / "note.txt").write_text("")
    (path / "step7_universal" / "zero" / "README").write_text("")
    notes = "\n".join(read(path).notes)
    assert "zero/a.bias/note.txt" in notes
    assert "zero/README" in notes


def test_folders_deeper_than_python_recurses(tmp_path: Path, fake_run) -> None:
    path = save_universal(fake_run(1, 2), tmp_path)
    zero = str(path / "step7_universal" / "zero")
    folders = [zero + "/a" * depth for depth in range(1, sys.getrecursionlimit() + 100)]
    for folder in folders:
        os.mkdir(folder)
    try:
        with pytest.raises(MissingFileError, match=r"a/a/fp32\.pt"):
            read(path)
    finally:  # too deep for pytest to remove
        for folder in reversed(folders):
            os.rmdir(folder)


def test_folders_in_that_of_a_parameter_are_parameters_only_if_they_are_known(tmp_path: Path, fake_run) -> None:
    path = save_universal(fake_run(1, 2, groups=({"a": (4,), "a/b/c": (4,)},)), tmp_path)
    zero = path / "step7_universal" / "zero"
    shutil.copytree(zero / "a/b/c", zero / "a/b/other")
    shutil.copytree(zero / "a/b/c", zero / "a/other")
    shutil.copytree(zero / "a/b/c", zero / "a/b/c/other")
    index = read(path)
    assert {name for name in index.atoms if name.startswith("a")} == {"a", "a/b/c", "a/b/other"}
    assert sorted(note.rpartition(" ")[2] for note in index.notes if "left alone" in note) == [
        "zero/a/b/c/other", "zero/a/other",
    ]  # fmt: skip


def test_a_nested_parameter_without_its_weights(tmp_path: Path, fake_run) -> None:
    path = save_universal(fake_run(1, 2, groups=({"a": (4,), "a/b": (4,), "x/y": (4,)},)), tmp_path)
    zero = path / "step7_universal" / "zero"
    (zero / "a/b/fp32.pt").unlink()
    for file in (zero / "x/y").iterdir():
        file.unlink()
    with pytest.raises(MissingFileError) as caught:
        read(path)
    assert "zero/a/b/fp32.pt" in str(caught.value)
    assert "zero/x/y/fp32.pt" in str(caught.value)


def test_a_trained_parameter_whose_folder_is_gone(tmp_path: Path, fake_run) -> None:
    """Its weights may be in the module, in a lesser type; its moments are nowhere."""
    path = save_universal(fake_run(1, 2), tmp_path)
    for name in ("a.bias", "b.weight"):
        shutil.rmtree(path / "step7_universal" / "zero" / name)
    with pytest.raises(MissingFileError, match=r"2 parameters:\n  b\.weight\n  a\.bias\n"):
        read(path)


@pytest.mark.parametrize("other", ["zero/emb.weight/exp_avg.pt", "mp_rank_00_model_states.pt"])
def test_a_file_that_is_no_optimizer_state_under_its_name(tmp_path: Path, other: str) -> None:
    """It would be read as one without groups, and its keys as extras."""
    shutil.copytree(FIXTURES / "z1-dp4-fp32" / "universal", tmp_path / "copy")
    tag = tmp_path / "copy" / "global_step3_universal"
    shutil.copyfile(tag / other, tag / "zero" / "optimizer_state.pt")
    with pytest.raises(MalformedError, match=r"zero_stage in .*optimizer_state\.pt"):
        read(tmp_path / "copy")


def test_a_model_parallel_rank_that_is_missing(tmp_path: Path, fake_run) -> None:
    run = fake_run(1, 2)
    run.models[0]["mp_world_size"] = 2
    with pytest.raises(MissingFileError, match=r"missing: mp_rank_01_model_states\.pt"):
        read(save_universal(run, tmp_path))
