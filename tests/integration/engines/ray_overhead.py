"""What Ray costs per batch and per run, on this machine: python -m tests.integration.engines.ray_overhead [BATCHES]."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import ray

from ucp.contract.protocols import Engine
from ucp.core.target import TargetOptions
from ucp.store.target import StoreTarget
from ucp.testing.handmade import Shards, make_index
from ucp.transfer.engines.ray import engine as ray_engine
from ucp.transfer.engines.ray.engine import RayEngine
from ucp.transfer.engines.serial import SerialEngine
from ucp.transfer.output_files import create
from ucp.transfer.tasks import Job, Task, make_job


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
        create(folder / "out", file)
    return replace(job, tasks=tasks, fsync=False)


def timed(engine: Engine, job: Job, root: Path) -> tuple[float, float]:
    """Seconds until the first report, and from there to the last."""
    start = time.perf_counter()
    stream = engine.run(job, root, job.tasks, workers=2, threads=1)
    next(stream)
    first = time.perf_counter()
    for _ in stream:
        pass
    return first - start, time.perf_counter() - first


def main(count: int) -> None:
    """Print what a batch takes: alone in its call, and eight tasks to a call."""
    with tempfile.TemporaryDirectory() as folder:
        job = made(Path(folder), count)
        root = Path(folder) / "out"
        _, alone = timed(SerialEngine(), job, root)
        print(f"serial: {1e3 * alone / count:.2f} ms a task")
        start = time.perf_counter()
        ray.init("local", num_cpus=2, include_dashboard=False, logging_level="WARNING", object_store_memory=80 << 20)
        print(f"a local Ray starts in {time.perf_counter() - start:.1f} s")
        ray_engine._batches = lambda tasks, workers: [[task] for task in tasks]
        for _ in range(2):  # then processes are there, and have imported ucp
            begun, rest = timed(RayEngine(), job, root)
            print(f"ray, a task a batch: first report after {begun:.2f} s, then {1e3 * rest / count:.2f} ms a batch")
        ray_engine._batches = lambda tasks, workers: [tasks[low : low + 8] for low in range(0, len(tasks), 8)]
        begun, rest = timed(RayEngine(), job, root)
        print(f"ray, eight tasks a batch: first report after {begun:.2f} s, then {1e3 * rest / count:.2f} ms a task")
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 800)
