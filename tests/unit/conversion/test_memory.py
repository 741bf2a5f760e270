"""Peak memory stays within the budget, whatever the size of a tensor.

Measured: a fresh interpreter converts a tensor several times larger than the budget with two workers, and tells
when it is about to begin. From then on the proportional set size (PSS, `/proc/PID/smaps_rollup`: memory shared by
processes is counted once) of it and its workers is summed every ten milliseconds; what it was at the beginning (the
interpreter and the libraries it imported) is subtracted. The page cache belongs to nobody and is not counted.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucp
from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box
from ucp.core.tensor import DType, TensorRef
from ucp.testing.handmade import Shards, make_index, write_checkpoint
from ucp.transfer.plan.task_list import pick_tasks
from ucp.transfer.worker import Worker

MIB = 1 << 20
BUDGET = 128 * MIB
PER_INTERPRETER = 40 * MIB
"""Pages that a forked worker changes of the parent's, libraries that it imports on first use, malloc's own."""
ROWS, COLUMNS = 4096, 12 * 1024
"""A tensor of 192 MiB in float32."""

RUNNER = """
import sys, numpy, ml_dtypes, zstandard, multiprocess
import ucp, ucp.store.index, ucp.store.target, ucp.transfer.engines.processes
print("ready", flush=True)
sys.stdin.readline()
ucp.convert({src!r}, {dst!r}, memory={memory}, workers=2, **{options!r})
"""

COMPARER = """
import sys, numpy, ml_dtypes, zstandard, xxhash
import ucp, ucp.store.index
print("ready", flush=True)
sys.stdin.readline()
assert not ucp.diff({src!r}, {dst!r}, memory={memory}).equal
"""


def sparse_source(
    folder: Path,
    *,
    dtype: DType,
    cast_copy: bool = False,
    columns: int = 1,
    terms: int = 1,
    byte: bytes = b"",
    transposed: bool = False,
    rows: int = ROWS,
) -> Path:
    """A checkpoint of one large tensor of zeros that take no space on disk; or all of `byte`, which do."""
    folder.mkdir()
    with (folder / "shard.bin").open("wb") as file:
        for _ in range(rows * COLUMNS * dtype.itemsize // MIB):
            file.write(byte * MIB)
        file.truncate(rows * COLUMNS * 16)
    fragments = []
    width = COLUMNS // columns
    for term in range(terms):
        for column in range(columns):
            ref = TensorRef(
                path=str(folder / "shard.bin"),
                offset=(term * columns + column) * rows * width * dtype.itemsize,
                dtype=dtype,
                shape=(rows, width),
                strides=(1, rows) if transposed else (width, 1),
            )
            fragments.append(Fragment(box=Box((0, column * width), (rows, width)), ref=ref, term=term))
    if cast_copy:
        ref = TensorRef(
            path=str(folder / "shard.bin"),
            offset=0,
            dtype=DType.BFLOAT16,
            shape=(rows, COLUMNS),
            strides=(COLUMNS, 1),
        )
        fragments.append(Fragment(box=Box.full(ref.shape), ref=ref, replica=1))
    state = StateIndex(
        dtype=dtype,
        global_shape=(rows, COLUMNS),
        fragments=tuple(fragments),
        overlap=Overlap.MEAN if terms > 1 else Overlap.EXCLUSIVE,
    )
    write_checkpoint(make_index(folder, {("w", "weight"): state}))
    return folder


def pss(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")), 0)


def family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(int(child) for child in children)]


def peak_of(src: Path, dst: Path, *, runner: str = RUNNER, memory: int = BUDGET, **options) -> int:
    """Most bytes in use at once, beyond those of the interpreter at rest."""
    code = runner.format(src=str(src), dst=str(dst), memory=memory, options=options)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        rest, peak = pss(process.pid), 0
        process.stdin.write(b"\n")
        process.stdin.flush()
        while process.poll() is None:
            peak = max(peak, sum(map(pss, family(process.pid))))
            time.sleep(0.01)
        assert process.returncode == 0
    return peak - rest


@pytest.fixture
def disk(tmp_path_factory):
    """Room for large files: in memory where there is some, so that the test is quick."""
    import shutil
    import tempfile

    roomy = Path("/dev/shm")
    is_roomy = roomy.is_dir() and shutil.disk_usage(roomy).free > 4 << 30
    folder = Path(tempfile.mkdtemp(dir=roomy)) if is_roomy else tmp_path_factory.mktemp("disk")
    yield folder
    shutil.rmtree(folder)


CASES = {
    "columns": ({"columns": 8}, {}),
    "cast-and-compared": ({"cast_copy": True}, {"dtypes": {"weight": "float64"}}),
    "narrowed": ({}, {"dtypes": {"weight": "float8_e5m2"}}),
    "averaged": ({"terms": 2, "dtype": DType.BFLOAT16}, {}),
    "transposed-and-compared": ({"transposed": True, "cast_copy": True}, {}),
    "transposed-and-compressed": ({"transposed": True}, {"compress": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_peak_memory_is_within_the_budget(disk, case):
    layout, options = CASES[case]
    source = sparse_source(disk / "source", **{"dtype": DType.FLOAT32, **layout})
    peak = peak_of(source, disk / "out", **options)
    print(f"{case}: {peak / MIB:.0f} MiB")
    assert peak < BUDGET + 3 * PER_INTERPRETER


@pytest.mark.slow
def test_writing_and_reading_what_is_compressed_is_within_the_budget(disk):
    source = sparse_source(disk / "source", dtype=DType.BFLOAT16)
    peaks = [peak_of(source, disk / "packed", compress=True), peak_of(disk / "packed", disk / "out")]
    print(f"compressed, decompressed: {[peak // MIB for peak in peaks]} MiB")
    assert max(peaks) < BUDGET + 3 * PER_INTERPRETER


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtypes", "memory", "rows"),
    [(("bfloat16", "bfloat16"), 160 * MIB, ROWS), (("float8_e5m2", "float16"), 40 * MIB, 2560)],
)
def test_comparing_what_differs_in_every_element_is_within_the_budget(disk, dtypes, memory, rows):
    zeros = sparse_source(disk / "zeros", dtype=DType(dtypes[0]), rows=rows)
    others = sparse_source(disk / "others", dtype=DType(dtypes[1]), rows=rows, byte=b"\x3c")
    peak = peak_of(zeros, others, runner=COMPARER, memory=memory)
    print(f"{dtypes}, {memory / MIB:.0f} MiB: {peak / MIB:.0f} MiB")
    assert peak < memory + PER_INTERPRETER


def many_parameters(folder: Path, count: int) -> Path:
    """A checkpoint of `count` parameters of four states, each of 16 bytes."""
    shards = Shards(folder)
    states = {}
    for number in range(count):
        for state in ("weight", "exp_avg", "exp_avg_sq", "master"):
            array = np.full(4, number, dtype=np.float32)
            states[f"layers.{number}", state] = shards.whole(array, file=f"{state}.bin")
    write_checkpoint(make_index(shards.folder, states))
    return shards.folder


@pytest.mark.parametrize(("target", "topology"), [("ucp", None), ("dcp", "dp=2")])
def test_the_memory_of_the_index_is_what_the_plan_says(tmp_path: Path, target: str, topology: str | None) -> None:
    """The more parameters, the more memory, and no more than `plan` states."""
    stated, peaks = zip(
        *(
            memory_of(many_parameters(tmp_path / f"source{count}", count), to=target, topology=topology)
            for count in (30, 150)
        ),
        strict=True,
    )
    assert 0 < peaks[1] - peaks[0] <= stated[1] - stated[0] <= 4 * (peaks[1] - peaks[0])


@pytest.mark.parametrize("target", ["ucp", "torch"])
@pytest.mark.parametrize(
    "client_state",
    [
        [{"sample": number, "name": str(number)} for number in range(4_000)],
        bytes(range(256)) * 20_000,
        "x" * 5_000_000,
    ],
    ids=["small dicts", "bytes", "text"],
)
def test_the_memory_of_client_state_is_what_the_plan_says(tmp_path: Path, client_state: object, target: str) -> None:
    torch = pytest.importorskip("torch")
    stated, peaks = [], []
    for name, value in (("without", None), ("with", client_state)):
        (tmp_path / name).mkdir()
        torch.save({"model": {"weight": torch.ones(2)}, "client": value}, tmp_path / name / "ckpt.pt")
        plan, peak = memory_of(tmp_path / name, to=target)
        stated.append(plan)
        peaks.append(peak)
    assert 1 << 20 < peaks[1] - peaks[0] <= stated[1] - stated[0] <= 4 * (peaks[1] - peaks[0])


def memory_of(source: Path, **options: Any) -> tuple[int, int]:
    """Bytes that `plan` states for the index, and the peak of a conversion, which buffers add the same to each time."""
    stated = ucp.plan(source, **options).index_bytes
    tracemalloc.start(1)
    try:
        ucp.convert(source, source.with_name(f"{source.name}-{options['to']}"), workers=1, **options)
        return stated, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_finished_conversion_leaves_no_buffer_in_a_cycle(tmp_path: Path) -> None:
    source = many_parameters(tmp_path / "source", 2)
    gc.collect()
    gc.disable()
    try:
        for number in range(2):
            ucp.convert(source, tmp_path / f"atoms{number}", workers=1)
        assert not [value for value in gc.get_objects() if type(value) is Worker]
    finally:
        gc.enable()


def test_tasks_are_made_when_an_engine_takes_them() -> None:
    """A plan of 13 TiB has 445,000 tasks."""
    made: list[int] = []

    class Tasks(Sequence[int]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, at: int) -> int:
            made.append(at)
            return at

    picked = pick_tasks(Tasks(), (5, 0, 3))
    assert not made
    assert (picked[1], len(picked), list(picked[1:])) == (0, 3, [0, 3])
