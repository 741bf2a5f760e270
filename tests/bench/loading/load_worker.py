"""One rank of `tests.bench.loading.load`: loads a checkpoint into a model of whole parameters, and says what it cost.

torchrun --nproc-per-node 4 tests/bench/loading/load_worker.py CHECKPOINT EXCHANGE RATE OUT

RATE: bytes per second that all ranks together get of the store, 0 for as many as there are. Reading is held up by a
clock that they share, as a file server would hold it up.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed, nn

import ucp
from ucp.io.files import LocalFile
from ucp.live.exchange.stages import Exchange


class Clock:
    """When the store is free again, in a file that all ranks see."""

    def __init__(self, path: Path, rate: float) -> None:
        self._file = path.open("r+b")
        self._rate = rate

    def take(self, nbytes: int) -> None:
        """Wait until so many bytes would have come."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        (free,) = struct.unpack("d", os.pread(self._file.fileno(), 8, 0))
        ready = max(free, time.monotonic()) + nbytes / self._rate
        os.pwrite(self._file.fileno(), struct.pack("d", ready), 0)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        time.sleep(max(ready - time.monotonic(), 0))


def throttle(path: Path, rate: float) -> None:
    """Hold up what this process reads of source files from now on."""
    reading = LocalFile.read_into
    local = threading.local()

    def held_up(self: LocalFile, views: Sequence[memoryview], offset: int) -> None:
        if not hasattr(local, "clock"):  # a lock of a file is that of who opened it
            local.clock = Clock(path, rate)
        local.clock.take(sum(view.nbytes for view in views))
        reading(self, views, offset)

    LocalFile.read_into = held_up  # type: ignore[method-assign]


def main() -> None:
    checkpoint, exchange, rate, out = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    if rate:
        throttle(out / "clock", rate)
    shapes = json.loads((checkpoint / "shapes.json").read_text())
    zeros = {name.replace(".", "_"): nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    model = nn.ParameterDict(zeros)
    called = {name.replace(".", "_"): name for name in shapes}
    distributed.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    report = ucp.load_into(
        model, checkpoint=checkpoint, rename=called.__getitem__, exchange=Exchange(exchange).value, strict=True
    )
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    grown = (after.ru_maxrss - before.ru_maxrss) << 10
    result = {"seconds": seconds, "busy": busy, "total": report.nbytes_total, "grown": grown}
    (out / f"{rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
