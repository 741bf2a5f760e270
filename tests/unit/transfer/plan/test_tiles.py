"""A tensor is read once, whatever the order in which its source and what is made of it lie."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from importlib import import_module
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from ucp_patterns.shard import Shard

import ucp
from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box
from ucp.core.target import OutputFile, Placement, RawCopy, Slice, TargetPlan, full_slice
from ucp.core.tensor import DType
from ucp.errors import MalformedError, ReplicaError
from ucp.source.read import index_of
from ucp.testing.handmade import Shards, make_index, write_checkpoint
from ucp.transfer.engines.serial import SerialEngine
from ucp.transfer.output_files import create_file, make_receipts
from ucp.transfer.plan.job import make_job
from ucp.transfer.plan.tiles import needs_tiles, resolve_in_tile, split_tiles

BLOCK = 4 << 10
SHAPE = (96, 40, 12)
"""180 KiB of float32: 45 blocks."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Bounds in proportion to the tensors here."""
    bounds = {
        "transfer.plan.job": {"BLOCK": BLOCK, "TASK": 4 * BLOCK},
        "transfer.worker": {
            "BLOCK": BLOCK,
            "TILE": 2 * BLOCK,
            "MEAN_WINDOW": BLOCK // 8,
            "WINDOW": 1 << 10,
            "MIN_JOINED": 8,
        },
        "transfer.gather": {"MAX_READ": BLOCK},
        "transfer.plan.tiles": {"MIN_TILED": BLOCK, "CALL_BYTES": 1 << 10, "GAP": 32},
        "core.slices": {"GAP": 32},
    }
    bounds |= {
        name: {"BLOCK": BLOCK}
        for name in (
            "transfer.compare",
            "conversion.prepare",
            "store.describe",
            "live.exchange.reads",
        )
    }
    for name, values in bounds.items():
        for bound, value in values.items():
            monkeypatch.setattr(import_module(f"ucp.{name}"), bound, value)


@pytest.fixture
def nbytes_read(monkeypatch):
    """Bytes of tensors read of a file since it was last asked."""
    read: list[tuple[str, int]] = []
    real = os.preadv

    def preadv(descriptor, buffers, offset):
        got = real(descriptor, buffers, offset)
        read.append((os.readlink(f"/proc/self/fd/{descriptor}"), got))
        return got

    monkeypatch.setattr(os, "preadv", preadv)

    def of(file: Path) -> int:
        found = sum(nbytes for path, nbytes in read if path == str(file))
        read.clear()
        return found

    return of


def source(folder: Path, array: np.ndarray, order: tuple[int, ...], *, copies: int = 1) -> Path:
    """A checkpoint of one tensor whose dims lie in that order, with its checksum; the copies are row-major."""
    shards, box = Shards(folder), Box.full(array.shape)
    refs = [shards.put(array, order=order), *(shards.put(array) for _ in range(1, copies))]
    fragments = tuple(Fragment(box=box, ref=ref, replica=n) for n, ref in enumerate(refs))
    state = StateIndex(dtype=DType(array.dtype.name), global_shape=array.shape, fragments=fragments)
    write_checkpoint(make_index(shards.folder, {("w", "weight"): state}, records=[shards.record(ref) for ref in refs]))
    return folder / "shard.bin"


def numbers(dtype="float32"):
    return np.arange(np.prod(SHAPE), dtype=dtype).reshape(SHAPE)


def held(path: Path, dtype="float32"):
    (atom,) = ucp.open(path).atoms.values()
    return ucp.open(path).read(atom.index.name, "weight").numpy().astype(dtype)


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("options", [{}, {"compress": True}, {"dtypes": {"weight": "float64"}}], ids=str)
def test_a_conversion_reads_the_source_once(tmp_path, nbytes_read, order, options):
    file = source(tmp_path / "source", numbers(), order)
    report = ucp.convert(tmp_path / "source", tmp_path / "out", workers=1, **options)
    assert numbers().nbytes <= nbytes_read(file) <= 1.05 * numbers().nbytes  # rows that two blocks share, twice
    assert report.checked_bytes == numbers().nbytes
    assert (held(tmp_path / "out") == numbers()).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2)])
def test_what_is_compared_is_read_once(tmp_path, nbytes_read, order):
    """By diff; by verify, which compares copies and sums what is recorded beside it; by what proves a conversion."""
    file = source(tmp_path / "source", numbers(), order, copies=2)
    source(tmp_path / "other", numbers(), (0, 1, 2))
    assert ucp.diff(tmp_path / "source", tmp_path / "other", workers=1).equal
    assert nbytes_read(file) == numbers().nbytes
    assert ucp.diff(tmp_path / "other", tmp_path / "source", workers=1).equal
    assert nbytes_read(file) == numbers().nbytes
    assert ucp.verify(tmp_path / "source", workers=1).ok
    assert nbytes_read(file) == 4 * numbers().nbytes
    ucp.convert(tmp_path / "source", tmp_path / "out", workers=1, verify=True)
    assert nbytes_read(file) == 3 * numbers().nbytes


@pytest.mark.parametrize("compress", [False, True])
def test_copies_that_differ_are_found_in_whatever_order(tmp_path, compress):
    changed = numbers()
    changed[17, 5, 3] = -1
    shards, box = Shards(tmp_path / "source"), Box.full(SHAPE)
    fragments = (
        Fragment(box=box, ref=shards.put(numbers(), order=(2, 1, 0))),
        Fragment(box=box, ref=shards.put(changed, order=(1, 2, 0)), replica=1),
    )
    state = StateIndex(dtype=DType.FLOAT32, global_shape=SHAPE, fragments=fragments)
    write_checkpoint(make_index(shards.folder, {("w", "weight"): state}))
    with pytest.raises(ReplicaError, match=r"w/weight: 1 of \d+ elements"):
        ucp.convert(shards.folder, tmp_path / "out", workers=1, compress=compress)
    assert len(ucp.verify(shards.folder, workers=1).problems) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize("dim", [1, 2])
def test_parts_of_all_ranks_are_filled_from_one_reading(tmp_path, nbytes_read, order, dim):
    """A shard of a dim that is not the first is a short run of every row; each rank's by itself reads all rows."""
    array = numbers("int32")
    file = source(tmp_path / "source", array, order)
    index = index_of(tmp_path / "source")
    placements, files = [], []
    for rank in range(4):
        pairs = Shard(dim).regions(SHAPE, 4, rank)
        local = tuple(max(stops) for stops in zip(*(pair.local.stops for pair in pairs), strict=True))
        numel = int(np.prod(local))
        for path, low, high in ((f"a{rank}", 0, numel // 3), (f"b{rank}", numel // 3, numel)):  # flat, as ZeRO cuts
            own = Slice(
                param="w", state="weight", dtype=DType.INT32, pairs=pairs, local_shape=local, start=low, stop=high
            )
            placements.append(Placement(slice=own, path=path, offset=8))
            files.append(OutputFile(path=path, nbytes=own.nbytes + 8))
    job = make_job(index, TargetPlan(files=tuple(files), placements=tuple(placements)))
    (task,) = job.tasks
    assert len(task.fills) == 8
    for one in files:
        create_file(tmp_path, one)
    (done,) = SerialEngine().run(job, tmp_path, job.tasks, workers=1, threads=1)
    assert nbytes_read(file) == array.nbytes
    assert [(span.offset, span.nbytes) for span in done.spans] == [(0, array.nbytes)]
    for rank, part in enumerate(np.split(array, 4, axis=dim)):
        found = b"".join((tmp_path / f"{half}{rank}").read_bytes()[8:] for half in "ab")
        assert found == part.tobytes()
    assert [r.crc32 for r in make_receipts(job, done.sums).placements] == [
        zlib.crc32((tmp_path / one.path).read_bytes()[8:]) for one in files
    ]


def test_means_of_transposed_terms_are_those_of_plain_ones(tmp_path):
    terms = [numbers() * 3, numbers() - 5]
    for name, order in (("plain", (0, 1, 2)), ("crosswise", (2, 1, 0))):
        shards, box = Shards(tmp_path / name), Box.full(SHAPE)
        fragments = tuple(Fragment(box=box, ref=shards.put(t, order=order), term=n) for n, t in enumerate(terms))
        state = StateIndex(dtype=DType.FLOAT32, global_shape=SHAPE, fragments=fragments, overlap=Overlap.MEAN)
        write_checkpoint(make_index(shards.folder, {("w", "weight"): state}))
        ucp.convert(shards.folder, tmp_path / f"{name}-out", workers=1)
    assert ucp.diff(tmp_path / "plain-out", tmp_path / "crosswise-out").equal


def test_a_tensor_of_an_extra_is_read_once_too(tmp_path, nbytes_read):
    shards = Shards(tmp_path / "source")
    ref = shards.put(numbers(), order=(2, 1, 0))
    index = make_index(shards.folder, {("w", "weight"): shards.whole(np.zeros(3, "float32"))})
    file = OutputFile(path="extra", nbytes=ref.nbytes)
    job = make_job(index, TargetPlan(files=(file,), placements=(), raw=(RawCopy(src=ref, path="extra", offset=0),)))
    create_file(tmp_path, file)
    list(SerialEngine().run(job, tmp_path, job.tasks, workers=1, threads=1))
    assert nbytes_read(shards.folder / "shard.bin") == ref.nbytes
    assert (tmp_path / "extra").read_bytes() == numbers().tobytes()


def test_a_live_model_and_a_region_read_once_too(tmp_path, nbytes_read):
    torch = pytest.importorskip("torch")
    file = source(tmp_path / "source", numbers(), (2, 1, 0))
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(SHAPE))})
    ucp.load_into(model, checkpoint=tmp_path / "source")
    assert nbytes_read(file) == numbers().nbytes
    assert (model["w"].detach().numpy() == numbers()).all()
    region = Box((8, 0, 2), (64, 40, 5))
    found = ucp.open(tmp_path / "source").read("w", "weight", region)
    assert (found.numpy() == numbers()[8:72, :, 2:7]).all()
    assert nbytes_read(file) == found.nbytes


def test_moments_that_are_all_zero_are_read_in_long_runs(tmp_path, monkeypatch):
    shards, calls = Shards(tmp_path / "source"), []
    states = {("w", "weight"): shards.whole(numbers())}
    ref = shards.put(np.zeros(SHAPE, "float32"), order=(2, 1, 0))
    whole = Fragment(box=Box.full(SHAPE), ref=ref)
    states["w", "exp_avg"] = StateIndex(dtype=DType.FLOAT32, global_shape=SHAPE, fragments=(whole,))
    write_checkpoint(make_index(shards.folder, states))
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: (calls.append(args), real(*args))[1])
    with pytest.raises(MalformedError, match=r"exp_avg .*--zero-moments keep"):
        ucp.convert(tmp_path / "source", tmp_path / "out")
    assert len(calls) < 500


def test_plain_layouts_are_not_crosswise(tmp_path):
    """Rows, and what a flat partition holds of them, are read as they lie."""
    shards = Shards(tmp_path)
    state = shards.whole(numbers())
    own = full_slice("w", "weight", state)
    assert not needs_tiles(own, state, nbytes=BLOCK)
    pairs = Shard(0).regions(SHAPE, 4, 1)
    shard = replace(own, pairs=pairs, local_shape=(24, 40, 12), start=100, stop=9999)
    assert not needs_tiles(shard, state, nbytes=BLOCK)
    columns = tuple(
        Fragment(
            box=pair.global_box,
            ref=shards.put(numbers()[:, pair.global_box.offsets[1] :][:, : pair.global_box.sizes[1]]),
        )
        for rank in range(4)
        for pair in Shard(1).regions(SHAPE, 4, rank)
    )
    assert not needs_tiles(own, replace(state, fragments=columns), nbytes=BLOCK)


def test_slices_that_lie_alike_are_looked_at_once(tmp_path):
    """Where the bytes are does not matter, how they lie does."""
    shards, values = Shards(tmp_path), np.zeros((1024, 1024), np.float32)
    box, known, states = Box.full(values.shape), {}, []

    def stored(order: tuple[int, ...]) -> StateIndex:
        fragment = Fragment(box=box, ref=shards.put(values, order=order))
        states.append(StateIndex(dtype=DType.FLOAT32, global_shape=values.shape, fragments=(fragment,)))
        return states[-1]

    def looked_at() -> int:
        return sum(isinstance(key, tuple) for key in known)

    for order, count in (((1, 0), 1), ((1, 0), 1), ((0, 1), 1)):
        state = stored(order)
        own = full_slice("w", "weight", state)
        expected = needs_tiles(own, state, nbytes=BLOCK)
        assert needs_tiles(own, state, nbytes=BLOCK, cache=known) is expected is (order == (1, 0))
        assert looked_at() == count
    half = replace(full_slice("w", "weight", stored((1, 0))), start=7)
    needs_tiles(half, stored((1, 0)), nbytes=BLOCK, cache=known)
    assert looked_at() == 2


def test_tiles_hold_every_element_once(tmp_path):
    state = Shards(tmp_path).whole(numbers())
    own = full_slice("w", "weight", state)
    transposed = replace(
        state, fragments=(Fragment(box=Box.full(SHAPE), ref=Shards(tmp_path).put(numbers(), order=(2, 0, 1))),)
    )
    seen = np.zeros(SHAPE, int)
    for tile in split_tiles(own, transposed, nbytes=BLOCK):
        assert tile.nbytes <= BLOCK
        (pair,) = tile.pairs
        seen[
            tuple(slice(low, high) for low, high in zip(pair.global_box.offsets, pair.global_box.stops, strict=True))
        ] += 1
        assert sum(np.prod(piece.sizes) for piece in resolve_in_tile(own, tile, SHAPE)) == tile.stop
    assert (seen == 1).all()
