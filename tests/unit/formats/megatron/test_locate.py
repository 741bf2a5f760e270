"""Which folder holds a checkpoint of Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ucp_formats.megatron.names import SavedAs
from ucp_formats.megatron.source import locate, require_folder

from ucp.errors import MalformedError, UnknownFormatError, UsageError

TRACKER = "latest_checkpointed_iteration.txt"


def legacy(path: Path, *names: str) -> Path:
    for name in names or ("mp_rank_00",):
        (path / name).mkdir(parents=True)
        (path / name / "model_optim_rng.pt").write_bytes(b"")
    return path


def backend(path: Path, name: str) -> Path:
    path.mkdir(parents=True)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": name, "sharded_backend_version": 1}))
    return path


def test_the_tracker_is_followed(tmp_path: Path) -> None:
    legacy(tmp_path / "iter_0000005")
    legacy(tmp_path / "iter_0000010")
    (tmp_path / TRACKER).write_text("5\n")
    found = require_folder(locate(tmp_path), tmp_path)
    assert found.root == tmp_path / "iter_0000005"
    assert found.content is SavedAs.TORCH
    assert found.reasons == (f"{TRACKER} -> iter_0000005", "folder mp_rank_00")


def test_a_release_is_followed(tmp_path: Path) -> None:
    legacy(tmp_path / "release", "mp_rank_00", "mp_rank_01")
    (tmp_path / TRACKER).write_text("release")
    found = locate(tmp_path)
    assert found.root == tmp_path / "release"
    assert found.reasons[1] == "2 folders such as mp_rank_00"


def test_an_iteration_and_a_rank_lead_there_too(tmp_path: Path) -> None:
    root = legacy(tmp_path / "iter_0000005", "mp_rank_00", "mp_rank_01")
    assert locate(root).root == root
    found = locate(root / "mp_rank_01")
    assert found.root == root
    assert found.reasons[0] == "mp_rank_01, the folder of a rank"


def test_of_several_one_must_be_named(tmp_path: Path) -> None:
    legacy(tmp_path / "iter_0000005")
    legacy(tmp_path / "iter_0000010")
    with pytest.raises(UsageError, match=rf"(?s)2 checkpoints .*\n  {tmp_path}/iter_0000010$"):
        require_folder(locate(tmp_path), tmp_path)


def test_a_tracker_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    legacy(tmp_path / "iter_0000005")
    (tmp_path / TRACKER).write_text("7")
    with pytest.raises(MalformedError, match=rf"(?s)'7',.*\n  {tmp_path}/iter_0000005$"):
        require_folder(locate(tmp_path), tmp_path)


@pytest.mark.parametrize("text", ["", "soon", "../x", "1" * 65, "-3", "²"])
def test_a_tracker_of_something_else_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / TRACKER).write_text(text, encoding="utf-8")
    assert locate(tmp_path) is None


@pytest.mark.parametrize("name", ["torch_dist", "zarr"])
def test_backends_of_megatron_core(tmp_path: Path, name: str) -> None:
    root = backend(tmp_path / "weights", name)
    assert locate(root).content == name
    assert locate(tmp_path).root == root


def test_metadata_of_others_is_ignored(tmp_path: Path) -> None:
    backend(tmp_path / "a", "something")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metadata.json").write_text("{")
    assert locate(tmp_path / "a") is None
    assert locate(tmp_path / "b") is None


def test_dcp_is_megatrons_only_in_an_iteration_folder(tmp_path: Path) -> None:
    for name in ("iter_0000005", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(b"")
    assert locate(tmp_path / "iter_0000005").content is SavedAs.TORCH_DCP
    assert locate(tmp_path / "other") is None


def test_nothing_is_found_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"")
    assert locate(tmp_path) is None
    assert locate(tmp_path / "mp_rank_00") is None
    assert locate(tmp_path / "nothing") is None
    with pytest.raises(UnknownFormatError, match="Megatron checkpoint"):
        require_folder(None, tmp_path)
