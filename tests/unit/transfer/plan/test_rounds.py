"""Files in rounds: bytes are written once, no round is too large, nothing is read twice if there is room."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from ucp_patterns.shard import Shard

from tests.unit.conftest import shrink
from ucp.core.index import Fragment, StateIndex
from ucp.core.region import Box
from ucp.core.target import OutputFile, Placement, Slice, TargetPlan
from ucp.core.tensor import DType
from ucp.errors import DestinationError
from ucp.source.read import index_of
from ucp.testing.handmade import Shards, make_index, write_checkpoint
from ucp.transfer.engines.serial import SerialEngine
from ucp.transfer.output_files import create_file
from ucp.transfer.plan.job import make_job
from ucp.transfer.plan.rounds import plan_room, split_rounds

RANKS = 4
SHAPE = (64, 32, 16)


@pytest.fixture
def array():
    return np.arange(np.prod(SHAPE), dtype="int32").reshape(SHAPE)


@pytest.fixture
def job(tmp_path, array, monkeypatch):
    """A tensor that is transposed in the source, for four files of a row each: one task reads it for all."""
    shrink(monkeypatch, block=4096, task=8192)
    monkeypatch.setattr(import_module("ucp.transfer.plan.tiles"), "MIN_TILED", 0)
    shards = Shards(tmp_path / "source")
    fragment = Fragment(box=Box.full(SHAPE), ref=shards.put(array, order=(2, 1, 0)))
    state = StateIndex(dtype=DType.INT32, global_shape=SHAPE, fragments=(fragment,))
    write_checkpoint(make_index(shards.folder, {("w", "weight"): state}))
    index = index_of(tmp_path / "source")
    files, placements = [], []
    for rank in range(RANKS):
        pairs = Shard(2).regions(SHAPE, RANKS, rank)
        local = (*SHAPE[:2], SHAPE[2] // RANKS)
        own = Slice(
            param="w",
            state="weight",
            dtype=DType.INT32,
            pairs=pairs,
            local_shape=local,
            start=0,
            stop=int(np.prod(local)),
        )
        placements.append(Placement(slice=own, path=f"f{rank}", offset=0))
        files.append(OutputFile(path=f"f{rank}", nbytes=own.nbytes))
    made = make_job(index, TargetPlan(files=tuple(files), placements=tuple(placements)))
    assert len(made.tasks) == 1, "read once for all files"
    return made


def sections(tasks):
    return sorted((s.placement, s.start, s.nbytes) for task in tasks for fill in task.fills for s in fill.sections)


@pytest.mark.parametrize("together", [1, 2, 3, 4])
def test_every_byte_is_written_once(job, array, tmp_path, together):
    files = job.target.files
    cut, rounds = split_rounds(job, files, limit=together * files[0].nbytes)
    assert [len(own.files) for own in rounds] == [together] * (RANKS // together) + [RANKS % together] * bool(
        RANKS % together
    )
    assert sections(cut.tasks) == sections(job.tasks)
    assert [task.number for task in cut.tasks] == list(range(len(cut.tasks)))
    assert cut.tasks[0] is not cut.tasks[0], "made when it is asked for"
    assert [task for each in rounds for task in each.tasks] == list(cut.tasks)
    assert all(own.nbytes <= together * files[0].nbytes for own in rounds)
    number_of = {file.path: number for number, own in enumerate(rounds) for file in own.files}
    assert all(len({number_of[fill.path] for fill in task.fills}) == 1 for task in cut.tasks)
    for file in files:
        create_file(tmp_path, file)
    list(SerialEngine().run(cut, tmp_path, cut.tasks, workers=1, threads=1))
    for rank, part in enumerate(np.split(array, RANKS, axis=2)):
        assert (tmp_path / f"f{rank}").read_bytes() == part.tobytes()


def test_what_is_finished_is_of_no_round(job):
    cut, rounds = split_rounds(job, job.target.files, limit=1, finished={"f1", "f2"})
    assert [file.path for own in rounds for file in own.files] == ["f0", "f3"]
    assert sections(cut.tasks) == sections(job.tasks)
    assert {fill.path for task in cut.tasks[:1] for fill in task.fills} == {"f1", "f2"}


def test_where_there_is_room_nothing_is_read_twice(job, monkeypatch):
    each, total = job.target.files[0].nbytes, sum(file.nbytes for file in job.target.files)
    monkeypatch.setattr(import_module("ucp.transfer.plan.rounds"), "ROUND", each)
    assert plan_room(job, job.target.files, free=10 * total, place="/s").limit == total
    assert plan_room(job, job.target.files, free=total, place="/s").limit == total // 2
    tight = plan_room(job, job.target.files, free=each, place="/s")
    assert (tight.limit, tight.nbytes) == (each, each)
    with pytest.raises(DestinationError, match=f"{each:,} .* f0 at /s,.* {each - 1:,}\\. "):
        plan_room(job, job.target.files, free=each - 1, place="/s")
