"""One rank of `test_carry_gloo.py`: ranks that hold different things bring them, fail together, and lose one of them.

torchrun --nproc-per-node 4 carry_worker.py FILE OUT (kill|)
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from ucp_patterns.chunk import Chunk
from ucp_patterns.replicate import Replicate

from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.errors import UcpError
from ucp.live.exchange.carry import CarryOptions, carry
from ucp.live.exchange.stages import Exchange
from ucp.live.parts import LivePart, LoadItem
from ucp.live.run.ranks import Ranks, find_ranks

ROWS, COLUMNS, LAYERS = 1200, 256, 6

TP, DP = AxisLayout("tp", 2, Chunk(0)), AxisLayout("dp", 2, Chunk(0))
EVERYWHERE = Layout((AxisLayout("tp", 2, Replicate()), AxisLayout("dp", 2, Replicate())))
LAYOUTS = {
    "norm": EVERYWHERE,
    "up": Layout((TP, AxisLayout("dp", 2, Replicate()))),
    "down": Layout((AxisLayout("tp", 2, Chunk(1)), AxisLayout("dp", 2, Replicate()))),
    "moment": Layout((TP,), flat=(DP,)),
}


def items_of(path: Path, rank: int) -> list[LoadItem]:
    """What a rank of tp=2, dp=2 holds of tensors that lie one after another in a file, a layer after the other."""
    coords = {"tp": rank % 2, "dp": rank // 2}
    items = []
    at = 0
    for layer in range(LAYERS):
        for kind, layout in LAYOUTS.items():
            shape = (ROWS, COLUMNS)
            strides = contiguous_strides(shape)
            ref = TensorRef(path=str(path), offset=at, dtype=DType.FLOAT32, shape=shape, strides=strides)
            box = Box.full(shape)
            source = StateIndex(dtype=DType.FLOAT32, global_shape=shape, fragments=(Fragment(box=box, ref=ref),))
            at += ref.nbytes
            local = {"up": (ROWS // 2, COLUMNS), "down": (ROWS, COLUMNS // 2), "moment": (ROWS // 2, COLUMNS)}
            part = LivePart(local_shape=local.get(kind, shape), layout=layout, coords=coords)
            own = part.to_slice(f"layers.{layer}.{kind}", "weight", shape, DType.FLOAT32)
            items.append(LoadItem(name=own.param, slice=own, source=source))
    return items


def truth(items: list[LoadItem], path: Path) -> list[np.ndarray]:
    held = []
    for item in items:
        (fragment,) = item.source.fragments
        assert isinstance(fragment.ref, TensorRef)
        whole = np.fromfile(path, dtype=np.float32, count=ROWS * COLUMNS, offset=fragment.ref.offset)
        array = whole.reshape(ROWS, COLUMNS)
        (pair,) = item.slice.pairs
        low, high = pair.global_box.offsets, pair.global_box.stops
        held.append(array[low[0] : high[0], low[1] : high[1]].reshape(-1)[item.slice.start : item.slice.stop])
    return held


def brought(path: Path, ranks: Ranks, options: CarryOptions) -> dict[str, object]:
    items = items_of(path, ranks.rank)
    into = [torch.full((item.slice.stop - item.slice.start,), 9.0) for item in items]
    traffic = carry(items, into, ranks, options)
    held = truth(items, path)
    wrong = [i.name for i, own, array in zip(items, into, held, strict=True) if not np.array_equal(own.numpy(), array)]
    return {
        "wrong": wrong,
        "total": sum(traffic.nbytes),
        "wanted": traffic.wanted_nbytes,
        "received": traffic.exchanged_nbytes,
        "peak": traffic.peak_nbytes,
    }


def failed(path: Path, ranks: Ranks) -> dict[str, object]:
    """Rank 1 lacks the file of the last layer, and is in three sets."""
    items = items_of(path, ranks.rank)
    if ranks.rank == 1:
        for at in range(len(items) - len(LAYOUTS), len(items)):
            (own,) = items[at].source.fragments
            assert isinstance(own.ref, TensorRef)
            lost = replace(own, ref=replace(own.ref, path=str(path) + ".gone"))
            items[at] = replace(items[at], source=replace(items[at].source, fragments=(lost,)))
    into = [torch.zeros(item.slice.stop - item.slice.start) for item in items]
    try:
        carry(items, into, ranks, CarryOptions(exchange=Exchange.ALWAYS, memory=1 << 20))
    except UcpError as error:
        return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "nothing", "text": ""}


class Dying:
    """Kills its process when the first bytes have come."""

    def begin(self, *, title: str, nbytes: int) -> None:
        """Nothing."""

    def advance(self, nbytes: int) -> None:
        """The end."""
        os._exit(7)

    def end(self) -> None:
        """Nothing."""


def bereft(path: Path, ranks: Ranks, out: Path) -> None:
    """Rank 3 dies under way."""
    observer = Dying() if ranks.rank == 3 else None
    began = time.perf_counter()
    try:
        brought(path, ranks, CarryOptions(exchange=Exchange.ALWAYS, memory=1 << 20, observer=observer))
        text = ""
    except UcpError as error:
        text = f"{type(error).__mro__[1].__name__}: {error}"
    seconds = time.perf_counter() - began
    (out / f"bereft{ranks.rank}.json").write_text(json.dumps({"text": text, "seconds": seconds}))
    os._exit(3)


def main() -> None:
    path, out, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    distributed.init_process_group("gloo")
    ranks = find_ranks(None, torch.device("cpu"))
    if mode == "kill":
        bereft(path, ranks, out)
    result = {
        exchange.value: brought(path, ranks, CarryOptions(exchange=exchange, memory=4 << 20, verify=True))
        for exchange in Exchange
    }
    result["failed"] = failed(path, ranks)
    (out / f"{ranks.rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
