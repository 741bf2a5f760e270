"""Keys and paths of `.metadata`: torch records both, so that damage to a name shows."""

from __future__ import annotations

import pickle
import pickletools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ucp.errors import MalformedError
from ucp.io.dcp.checkpoint import read_dcp
from ucp.io.dcp.metadata import read_metadata

FIXTURES = Path(__file__).parents[4] / "fixtures" / "torch"
ODD = {
    "with.dots": {"state.w.exp_avg": torch.ones(2), "": torch.ones(3)},
    7: {True: torch.ones(1), ("a", 1): 5, None: {"x": 1}},
    "list": [torch.ones(2), [torch.ones(3), {"y": "text"}], (torch.ones(1),)],
    "empty": {},
    "": torch.ones(1),
}


def _save(state: dict[Any, Any], folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it assumes a single process
        dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


def _edit(file: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_torch_joins_a_path_of_any_kind_for_its_key(tmp_path: Path) -> None:
    paths = read_metadata(str(_save(ODD, tmp_path / "x") / ".metadata")).paths
    assert paths["with.dots.state.w.exp_avg"] == ("with.dots", "state.w.exp_avg")
    assert paths["list.1.1.y"] == ("list", 1, 1, "y")
    assert {"7.True", "with.dots.", ""} <= paths.keys()


@pytest.mark.parametrize("cached", [False, True])
def test_planners_of_torch_record_every_path(cached: bool, tmp_path: Path) -> None:
    for number in range(2):  # the second time from the plans of the first
        planner = DefaultSavePlanner(enable_plan_caching=cached)
        path = _save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / str(number), planner=planner)
        assert read_metadata(str(path / ".metadata")).paths == {"model.w": ("model", "w"), "step": ("step",)}


def test_without_nested_dicts_there_are_no_paths(tmp_path: Path) -> None:
    flat = DefaultSavePlanner(flatten_state_dict=False)
    path = _save({"model.w": torch.ones(2)}, tmp_path / "x", planner=flat)
    assert read_metadata(str(path / ".metadata")).paths == {}


@pytest.mark.parametrize(
    "path",
    [
        ("optim", "exp_evg"),
        ("optim",),
        ("optim.exp_avg", "x"),
        (),
        ["optim", "exp_avg"],
        None,
        ("optim", {}),
        ("optim", ["exp_avg"]),
        (b"optim", "exp_avg"),
        ("optim", 1.0),
    ],
)
def test_a_path_that_is_not_that_of_its_key_is_refused(path: object, tmp_path: Path) -> None:
    folder = _save({"optim": {"exp_avg": torch.ones(2)}, "step": 3}, tmp_path / "x")
    _edit(folder / ".metadata", lambda metadata: metadata.planner_data.update({"optim.exp_avg": path}))
    with pytest.raises(MalformedError, match=r"optim\.exp_avg"):
        read_dcp(str(folder))


@pytest.mark.parametrize("where", ["planner_data", "state_dict_metadata", "storage_data"])
def test_a_key_that_is_not_everywhere_is_refused(where: str, tmp_path: Path) -> None:
    folder = _save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / "x")

    def drop(metadata: Any) -> None:
        entries = getattr(metadata, where)
        del entries[next(key for key in entries if getattr(key, "fqn", key) == "model.w")]

    _edit(folder / ".metadata", drop)
    with pytest.raises(MalformedError, match=r"model\.w: (no|its) "):
        read_dcp(str(folder))


def test_metadata_without_the_attribute_of_the_paths_is_refused(tmp_path: Path) -> None:
    file = _save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / "x") / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"planner_data", b"planner_dat`"))
    with pytest.raises(MalformedError, match="planner_data"):
        read_dcp(str(tmp_path / "x"))


def test_a_path_that_one_rank_has_otherwise_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "small" / "2.13.0-local" / "checkpoint", tmp_path / "x"))
    _edit(folder / "__3.metadata", lambda metadata: metadata.planner_data.update({"note.list": ("note.list",)}))
    with pytest.raises(MalformedError, match=r"__3\.metadata: .*note\.list .*\('note', 'list'\)"):
        read_dcp(str(folder))


@pytest.mark.parametrize(
    ("case", "file"),
    [
        ("fsdp2-dp4", ".metadata"),
        ("fsdp2-dp4-titan", ".metadata"),
        ("small/2.1.2-sharded", ".metadata"),
        ("small/2.13.0-local", "__3.metadata"),
    ],
)
def test_a_flipped_bit_in_any_name_is_refused(case: str, file: str, tmp_path: Path) -> None:
    data = (FIXTURES / case / "checkpoint" / file).read_bytes()
    start = data.index(b"planner_data")
    texts = [(at, arg) for op, arg, at in pickletools.genops(data) if op.name == "SHORT_BINUNICODE" and at]
    names = [at for at, arg in texts if start < at < data.index(b"storage_data", start) and arg != "planner_data"]
    assert len(names) > 20
    for at in names[::3]:
        damaged = bytearray(data)
        damaged[at + 2] ^= 2
        (tmp_path / ".metadata").write_bytes(damaged)
        with pytest.raises(MalformedError, match=r"/\.metadata\b"):
            read_metadata(str(tmp_path / ".metadata"))
