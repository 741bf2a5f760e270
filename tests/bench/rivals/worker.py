"""One rank of `tests.bench.rivals.contest`: builds an engine and saves, or loads and says what the load alone cost.

torchrun --nproc-per-node 4 -m tests.bench.rivals.worker ENGINE save|theirs|ours CHECKPOINT LAYERS OUT
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from tests.bench.rivals.engines import ENGINES, Engine

_STATUS = Path("/proc/self/status")


def main() -> None:
    name, way, folder, layers, out = sys.argv[1:]
    engine: Engine = ENGINES[name](int(layers), is_universal=way == "theirs")
    if way == "save":
        engine.save(Path(folder))
    else:
        told = _measured(engine, way, Path(folder))
        told["digest"] = _digest(engine.states())
        Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _measured(engine: Engine, way: str, folder: Path) -> dict[str, object]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    dist.barrier()
    held = _status("VmRSS")
    asked, busy, began = _asked(), time.process_time(), time.perf_counter()
    stages = (engine.load_live if way == "ours" else engine.load)(folder)
    dist.barrier()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    grown = _status("VmHWM") - held  # with the states: those that were never written to took no memory before
    return {"seconds": seconds, "busy": busy, "grown": grown, "asked": _asked() - asked, "stages": stages or {}}


def _status(key: str) -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10


def _asked() -> int:
    """Bytes that this process has got from read calls, of files and pipes."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _digest(tensors: Iterator[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


if __name__ == "__main__":
    main()
