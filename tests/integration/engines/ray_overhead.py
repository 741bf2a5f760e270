"""What Ray costs per batch and per run, on this machine: python -m tests.integration.engines.ray_overhead [BATCHES]."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from ucp.contract.protocols import Engine
from ucp.core.target import TargetOptions
from ucp.store.target import StoreTarget
from ucp.testing.handmade import Shards, make_index
from ucp.transfer.engines.ray import engine as ray_engine
from ucp.transfer.engines.ray.engine import RayEngine
from ucp.transfer.engines.serial import SerialEngine
from ucp.transfer.output_files import create_file
from ucp.transfer.plan.job import Job, make_job
from ucp.transfer.plan.tasks import Task


def made(folder: Path, count: int) -> Job:
    """A job of `count` tasks that write next to nothing."""
    shards = Shards(folder / "source")
    array = np.zeros((4, 4), "float32")
    states = {(f"layer.{n}", "weight"): shards.whole(array) for n in range(count)}
    index = make_index(shards.folder, states)
    job = make_job(index, StoreTarget().plan(index, None, TargetOptions(layout="per-parameter")))
    fills = [fill for task in job.tasks for fill in task.fills]
    tasks = tuple(Task(number=n, fills=(fill,), nbytes=fill.nbytes) for n, fill in enumerate(fills))
    for file in job.target.files:
        create_file(folder / "out", file)
    return replace(job, tasks=tasks, fsync=False)


def timed(engine: Engine, job: Job, root: Path) -> tuple[float, str]:
    """Seconds until the first report, and what passed from there to the last, for each task."""
    start = time.perf_counter()
    stream = engine.run(job, root, job.tasks, workers=2, threads=1)
    next(stream)
    first, busy = time.perf_counter(), time.process_time()
    for _ in stream:
        pass
    rest, busy = time.perf_counter() - first, time.process_time() - busy
    count = len(job.tasks)
    return first - start, f"{1e3 * rest / count:.2f} ms a task, {1e3 * busy / count:.2f} of them work of the driver"


def main(count: int) -> None:
    """Print what tasks take alone in their batches, and eight to a batch."""
    import ray

    with tempfile.TemporaryDirectory() as folder:
        job = made(Path(folder), count)
        root = Path(folder) / "out"
        print(f"serial: {timed(SerialEngine(), job, root)[1]}")
        start = time.perf_counter()
        ray.init("local", num_cpus=2, include_dashboard=False, logging_level="WARNING", object_store_memory=80 << 20)
        print(f"a local Ray starts in {time.perf_counter() - start:.1f} s")
        for size in (1, 1, 8):  # the first starts processes, which import ucp
            ray_engine._batches = lambda tasks, workers, n=size: [tasks[at : at + n] for at in range(0, len(tasks), n)]
            begun, told = timed(RayEngine(), job, root)
            print(f"ray, batches of {size}: first report after {begun:.2f} s, then {told}")
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 800)
