"""Genuine checkpoints, damaged as copying, a full disk or a hand may damage them: nothing passes for whole."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ucp_formats.megatron.source import MegatronFormat

import ucp
from tests.golden.truth import FIXTURES as KEPT
from tests.golden.truth import load_stubbed
from ucp.conversion.prepare import SilentObserver
from ucp.core.gaps import check_cover
from ucp.core.index import WEIGHT, Index
from ucp.errors import CoverError, MalformedError, MissingFileError, UnsupportedError
from ucp.transfer.compare import find_drift

FIXTURES = KEPT / "megatron"
DIST = "llama-tp2-pp2-dp2-full"
FC2 = "decoder.layers.mlp.linear_fc2.weight"
NORM = "decoder.layers.0.input_layernorm.weight"
FULL = ("param", "exp_avg", "exp_avg_sq")


def read(folder: Path) -> Index:
    return MegatronFormat().read(folder)


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a kept checkpoint, and its iteration folder."""

    def copy(case: str = DIST) -> Path:
        shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / case)
        return next((tmp_path / case).glob("iter_*"))

    return copy


def change_metadata(root: Path, change: Callable[[Any], None]) -> None:
    file = root / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def change_common(root: Path, **arguments: object) -> None:
    common = load_stubbed(root / "common.pt")
    for key, value in arguments.items():
        setattr(common["args"], key, value)
    torch.save(common, root / "common.pt")


def without(key: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        del metadata.state_dict_metadata[key]
        for place in [own for own in metadata.storage_data if own.fqn == key]:
            del metadata.storage_data[place]

    return change


def twice(key: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[key].chunks
        chunks[1] = chunks[0]

    return change


def test_a_common_state_that_is_missing_is_told_with_all_else(damaged: Callable[..., Path]) -> None:
    root = damaged()
    (root / "common.pt").unlink()
    with pytest.raises(MissingFileError, match=r"common\.pt in .*common_state"):
        read(root)
    (root / "__0_0.distcp").unlink()
    with pytest.raises(MissingFileError, match=r"(?s)__0_0\.distcp.*common\.pt"):
        read(root)
    report = ucp.verify(root)
    assert not report.ok


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_in_place_of_the_common_state(
    damaged: Callable[..., Path], make: Callable[[Path], None]
) -> None:
    root = damaged()
    (root / "common.pt").unlink()
    make(root / "common.pt")
    with pytest.raises(MalformedError, match=r"/common\.pt"):
        read(root)


NANS = [0x7FC0, 0x7FFF, 0xFFFF]
LAYOUTS = [
    DIST,
    "llama-tp2-dp2-dp",
    "llama-tp2-dp2-gathered-0.13.1",
    "llama-tp2-dp2-modelspace-0.13.1",
    "llama-tp2-torch-fused",
    "llama-tp2-pp2-dp2-torch-zero",
]


def put(ref: Any, element: int, data: bytes) -> None:
    with Path(ref.path).open("r+b") as file:
        file.seek(ref.offset + element * ref.dtype.itemsize)
        file.write(data)


@pytest.mark.parametrize("case", LAYOUTS)
def test_any_nan_is_the_copy_of_any_nan(damaged: Callable[..., Path], case: str) -> None:
    """torch gives 0xffff for one of many, 0x7fc0 for one alone; another processor 0x7fff."""
    root = damaged(case)
    atoms = read(root).atoms
    norms = [name for name in atoms if "norm" in name][: len(NANS)]
    for bits, name in zip(NANS, norms, strict=True):
        for piece in atoms[name].states[WEIGHT].fragments:
            assert piece.ref.is_contiguous
            if piece.box.offsets == (0,):
                master = piece.ref.dtype.itemsize == 4
                put(piece.ref, 3, (0x7FC00000).to_bytes(4, "little") if master else bits.to_bytes(2, "little"))
    index = read(root)
    check_cover(index)
    assert find_drift(index, SilentObserver()) == []
    assert not any("the master differs from the weight" in note for note in index.notes)
    assert "exp_avg" in index.atoms[norms[2]].states


@pytest.mark.parametrize(
    "sizes", [{"num_layers": 10**18}, {"num_query_groups": -2}, {"num_layers": -1, "padded_vocab_size": -4}]
)
def test_sizes_of_no_model_are_told_together(damaged: Callable[..., Path], sizes: dict[str, int]) -> None:
    root = damaged()
    change_common(root, **sizes)
    with pytest.raises(MalformedError, match="".join(rf"\n  {name}: {value}" for name, value in sizes.items()) + "\n"):
        read(root)


@pytest.mark.parametrize("shape", [(2**62, 20, 28), (2**62, 0)])
def test_a_dim_that_no_chunk_bears_out(damaged: Callable[..., Path], shape: tuple[int, ...]) -> None:
    def change(metadata: Any) -> None:
        own = metadata.state_dict_metadata[FC2]
        own.size = torch.Size(shape)
        if 0 in shape:
            own.chunks.clear()

    root = damaged()
    change_metadata(root, change)
    with pytest.raises(MalformedError, match="4,611,686,018,427,387,904 tensors; "):
        read(root)


@pytest.mark.parametrize("state", FULL)
def test_a_parameter_that_lacks_a_state_of_others(damaged: Callable[..., Path], state: str) -> None:
    root = damaged()
    change_metadata(root, without(f"optimizer.state.{state}.{FC2}"))
    lacks = "master" if state == "param" else state
    with pytest.raises(MalformedError, match=rf"4 parameters .*\n  decoder\.layers\.0\.mlp.*: {lacks}\n"):
        read(root)


def test_a_parameter_without_any_state_is_frozen(damaged: Callable[..., Path]) -> None:
    root = damaged()
    for state in FULL:
        change_metadata(root, without(f"optimizer.state.{state}.{FC2}"))
    assert {atom.kind for name, atom in read(root).atoms.items() if "fc2" in name} == {"frozen"}


def test_a_legacy_parameter_that_lacks_a_state_of_others(damaged: Callable[..., Path]) -> None:
    root = damaged("llama-tp2-torch-fused")
    file = root / "mp_rank_01" / "model_optim_rng.pt"
    saved = load_stubbed(file)
    del saved["optimizer"]["optimizer"]["state"][2]["exp_avg"]
    torch.save(saved, file)
    with pytest.raises(MalformedError, match=r"1 parameter .*\n  .*, of mp_rank_01: exp_avg\n"):
        read(root)


def test_the_models_own_tensors_are_tiled_though_masters_are_taken(damaged: Callable[..., Path]) -> None:
    root = damaged()
    change_metadata(root, twice(FC2))
    with pytest.raises(CoverError, match=r"2 regions .*\n.* \[0:20, 0:14\] .* several.*\n.* \[0:20, 14:28\] "):
        read(root)


@pytest.mark.parametrize("text", ["", "\x00\x01", '{"sharded_backend": 7}', "[" * 10000, "[1]"])
def test_a_damaged_metadata_json(damaged: Callable[..., Path], text: str) -> None:
    root = damaged()
    (root / "metadata.json").write_text(text)
    with pytest.raises(MalformedError, match=r"metadata\.json; got "):
        read(root)


def test_a_metadata_json_that_is_missing(damaged: Callable[..., Path]) -> None:
    for case in (DIST, "qwen-tp2-dp2-dp-0.19.2"):
        root = damaged(case)
        (root / "metadata.json").unlink()
        with pytest.raises(MissingFileError, match=r"metadata\.json"):
            read(root)


def test_a_metadata_json_that_is_no_file(damaged: Callable[..., Path]) -> None:
    root = damaged()
    (root / "metadata.json").unlink()
    os.mkfifo(root / "metadata.json")
    with pytest.raises(MalformedError, match=r"metadata\.json; got "):
        read(root)


def test_backends_and_versions_that_are_not_known(damaged: Callable[..., Path]) -> None:
    root = damaged()
    (root / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 99}')
    with pytest.raises(UnsupportedError, match=r"version 1 of torch_dist .* got '99'"):
        read(root)
    (root / "metadata.json").write_text('{"sharded_backend": "other"}')
    with pytest.raises(UnsupportedError, match="got 'other'"):
        read(root)


@pytest.mark.parametrize("text", ["", "-10", "../../../etc"])
@pytest.mark.parametrize("case", [DIST, "llama-tp2-torch-fused"])
def test_a_tracker_that_names_no_iteration_is_noted(damaged: Callable[..., Path], case: str, text: str) -> None:
    root = damaged(case)
    assert not any("which is no iteration" in note for note in read(root.parent).notes)
    (root.parent / "latest_checkpointed_iteration.txt").write_text(text)
    held = repr(text) if text else "nothing"
    expected = f"latest_checkpointed_iteration.txt holds {held}, which is no iteration: {root.name} was read"
    assert read(root.parent).notes[0].startswith(expected)


def change_rank(root: Path, change: Callable[[Any], None]) -> None:
    file = root / "mp_rank_01" / "model_optim_rng.pt"
    saved = load_stubbed(file)
    change(saved)
    torch.save(saved, file)


def test_groups_that_differ_by_rank_are_told_by_setting(damaged: Callable[..., Path]) -> None:
    def change(saved: Any) -> None:
        saved["optimizer"]["optimizer"]["param_groups"][0]["lr"] = 11.0

    root = damaged("llama-tp2-torch-fused")
    change_rank(root, change)
    with pytest.raises(MalformedError, match=r"on mp_rank_01 lr is 11\.0, expected 0\.\d+"):
        read(root)


@pytest.mark.parametrize("is_master", [True, False])
def test_a_master_that_is_not_the_weight_is_told(damaged: Callable[..., Path], is_master: bool) -> None:
    def change(saved: Any) -> None:
        own = saved["optimizer"]["fp32_from_fp16_params"][1][0] if is_master else saved["model"][NORM]
        own.data[3] += 2

    root = damaged("llama-tp2-torch-fused")
    change_rank(root, change)
    with pytest.raises(MalformedError, match=rf"mp_rank_01.*: .*masters .*\n  {NORM} \[20\]\n.*drift"):
        read(root)
