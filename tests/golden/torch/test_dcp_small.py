"""Checkpoints of releases of torch from 2.1 on, and of ranks that each wrote metadata of their own.

Made by fixtures/make/torch/make_small.py with the real releases; compared with the truth of the live ranks.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat

import ucp
from tests.golden.torch.truth import ROOT, check_states, index_of, truth_of
from tests.golden.truth import plain
from ucp.errors import MalformedError, MissingFileError, SourceError, UnsupportedError

CASES = sorted(path.name for path in (ROOT / "small").iterdir())


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_the_truth_bit_for_bit(case: str) -> None:
    index = index_of(f"small/{case}")
    check_states(index, truth_of(f"small/{case}"))
    report = json.loads((ROOT / "small" / case / "truth.json").read_text())
    assert index.topology.ranks == report["ranks"]
    ((params, group),) = [(own.params, own.hyper) for own in index.groups]
    (wanted_group,) = report["groups"]
    assert list(params) == wanted_group.pop("params")
    assert plain(group) == wanted_group
    extras = {own.name: own.value for own in index.extras}
    assert index.step == 3
    assert extras["note"]["list"] == [1, 2]  # type: ignore[index]
    assert extras["lr_scheduler"]["last_epoch"] == 3  # type: ignore[index]


def save(state: dict[str, Any], **where: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, no_dist=True, **where)


def copied(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / case / "checkpoint", tmp_path / "copy"))


class TestMetadataOfEachRank:
    def test_copies_are_replicas(self) -> None:
        index = ucp.inspect(ROOT / "small" / "2.13.0-local" / "checkpoint")
        pieces = index.atoms["0.weight"].states["weight"].fragments
        assert sorted((own.box.offsets[0], own.replica) for own in pieces) == [(0, 0), (0, 1), (3, 0), (3, 1)]
        assert ucp.verify(index.path).ok

    @pytest.mark.parametrize("lost", [("__2.metadata", "__2_0.distcp"), ("__3.metadata",)], ids=["all", "metadata"])
    def test_a_rank_without_metadata_is_named(self, lost: tuple[str, ...], tmp_path: Path) -> None:
        copy = copied("small/2.13.0-local", tmp_path)
        for name in lost:
            (copy / name).unlink()
        with pytest.raises(MissingFileError, match=re.escape(lost[0])):
            ucp.inspect(copy)


def test_a_path_of_python_3_13_is_no_surprise(tmp_path: Path) -> None:
    copy = copied("small/2.13.0-local", tmp_path)
    for file in copy.glob("__*.metadata"):
        written = pickle.loads(file.read_bytes())  # a fixture
        data = pickle.dumps(written, protocol=0)
        assert b"cpathlib\nPosixPath" in data
        file.write_bytes(data.replace(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath"))
    assert ucp.diff(ROOT / "small" / "2.13.0-local" / "checkpoint", copy).equal


def refused(path: Path, error: type[SourceError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        ucp.inspect(path)
    assert len(str(caught.value).splitlines()) < 12


class TestFilesOfOtherSaves:
    """One short message, that says so."""

    def test_names_exchanged(self, tmp_path: Path) -> None:
        copy = copied("fsdp2-dp4", tmp_path)
        (copy / "__0_0.distcp").rename(copy / "x")
        (copy / "__1_0.distcp").rename(copy / "__0_0.distcp")
        (copy / "x").rename(copy / "__1_0.distcp")
        refused(copy, MalformedError, r"different saves[\s\S]*__0_0\.distcp: \d+ bytes[\s\S]*__1_0\.distcp")

    def test_a_file_twice(self, tmp_path: Path) -> None:
        copy = copied("fsdp2-dp4", tmp_path)
        shutil.copy(copy / "__1_0.distcp", copy / "__2_0.distcp")
        refused(copy, MalformedError, r"different saves[\s\S]*__2_0\.distcp")

    def test_metadata_of_another_run(self, tmp_path: Path) -> None:
        copy = copied("fsdp2-dp4", tmp_path)
        shutil.copy(ROOT / "fsdp1-dp4" / "checkpoint" / ".metadata", copy)
        refused(copy, MalformedError, r"different saves[\s\S]*__3_0\.distcp: \d+ of \d+ items not")

    def test_metadata_of_another_model(self, tmp_path: Path) -> None:
        for name, shape in (("a", (4, 6)), ("b", (6, 4))):
            save({"model": {"w": torch.ones(shape)}}, checkpoint_id=str(tmp_path / name))
        shutil.copy(tmp_path / "a" / ".metadata", tmp_path / "b")
        refused(tmp_path / "b", MalformedError, r"different saves[\s\S]*__0_0\.distcp: 1 item .*model\.w")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda path: path.mkdir(), MalformedError, "got a folder"),
        (os.mkfifo, MalformedError, "got a special"),
        (lambda path: path.symlink_to(path.name), SourceError, "symbolic links"),
    ],
)
def test_metadata_that_is_no_file(make: Any, error: type[SourceError], match: str, tmp_path: Path) -> None:
    copy = copied("fsdp2-dp4", tmp_path)
    (copy / ".metadata").unlink()
    make(copy / ".metadata")
    refused(copy, error, match)


def test_safetensors_of_torchs_own_writer_are_refused_by_name(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "out", serialization_format=SerializationFormat.SAFETENSORS)
    save({"a": torch.ones(4, 4), "b": torch.ones(3)}, storage_writer=writer)
    refused(tmp_path / "out", UnsupportedError, "SerializationFormat.SAFETENSORS")


def test_bytecheckpoint_is_refused_by_name(tmp_path: Path) -> None:
    metadata = b"cbytecheckpoint.checkpointer.meta_type\nMetadata\n)\x81}(Vstate_dict_metadata\n}Vstorage_data\n}ub."
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + metadata)
    refused(tmp_path, UnsupportedError, r"ByteCheckpoint.*merge_bcp\.py")


def test_a_number_as_a_state_of_the_optimizer(tmp_path: Path) -> None:
    """As Adafactor of transformers has it: `step` and `RMS` are Python numbers."""
    group = {"lr": 0.1, "params": ["w"]}
    optimizer = {
        "state": {"w": {"step": 3, "RMS": 0.5, "row": torch.ones(2, 2), "none": None}},
        "param_groups": [group],
    }
    save({"model": {"w": torch.ones(2, 2)}, "optimizer": optimizer}, checkpoint_id=tmp_path / "out")
    checkpoint = ucp.open(tmp_path / "out")
    assert {name: float(checkpoint.read("w", name).max()) for name in checkpoint.index.atoms["w"].states} == {
        "weight": 1.0,
        "step": 3.0,
        "RMS": 0.5,
        "row": 1.0,
    }
