"""What it costs one rank to plan a load of 150,000 tensors among 1,024 ranks.

    python -m tests.bench --case load-plan

Nothing is read. The other ranks are played: each holds what its coordinates say, which for the exchange of digests is
all that matters, so this rank hears from each of them what it would send, and answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ucp_patterns.chunk import Chunk
from ucp_patterns.replicate import Replicate

from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.live.exchange.stages import Exchange, plan_stages
from ucp.live.parts import LivePart, LoadItem

RANKS, TENSORS = 1024, 150_000
EXPERTS, HIDDEN, FFN = 256, 7168, 2048
STATES = ("weight", "exp_avg", "exp_avg_sq")
SHAPES = {"w1": (FFN, HIDDEN), "w2": (HIDDEN, FFN), "w3": (FFN, HIDDEN)}


class Played:
    """A rank among many that are not there: what they send is as much as they would send."""

    def __init__(self, count: int, copies: int) -> None:
        self.rank, self.count, self.device = 0, count, torch.device("cpu")
        self.copies = copies
        self._asked: list[NDArray[Any]] = []

    def share(self, value: Any) -> list[Any]:
        return [value] * self.count

    def swap(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """First: digests from all; of every `copies` ranks all send the same. Then: answers as this rank gives them."""
        if not self._asked:
            self._asked = [part.copy() for part in parts]
            own = [self._asked[0] + np.uint64(rank // self.copies * 2) for rank in range(self.count)]
            self._heard = own
            return own
        words = -(-self.count // 64)
        mask = np.zeros(words, dtype=np.uint64)
        for rank in range(self.copies):
            mask[rank // 64] |= np.uint64(1) << np.uint64(rank % 64)
        head = np.concatenate([np.array([1], dtype=np.uint64), mask])
        return [np.concatenate([head, np.zeros(len(part) // 2, dtype=np.uint64)]) for part in self._asked]

    def gather(self, part: torch.Tensor, whole: torch.Tensor, members: Sequence[int]) -> None:
        raise NotImplementedError


def items_of(tensors: int, layout: Layout, coords: dict[str, int]) -> Iterator[LoadItem]:
    """States of experts of a large mixture, as a rank holds them."""
    at = 0
    for number in range(tensors // (len(SHAPES) * len(STATES))):
        for name, shape in SHAPES.items():
            for state in STATES:
                strides = contiguous_strides(shape)
                ref = TensorRef(path=f"/x/{number % 64}", offset=at, dtype=DType.FLOAT32, shape=shape, strides=strides)
                source = StateIndex(
                    dtype=DType.FLOAT32, global_shape=shape, fragments=(Fragment(box=Box.full(shape), ref=ref),)
                )
                param = f"model.layers.{number // EXPERTS}.mlp.experts.{number % EXPERTS}.{name}.weight"
                rows = -(-shape[0] // (layout.axes[0].parts if isinstance(layout.axes[0].pattern, Chunk) else 1))
                part = LivePart(local_shape=(rows, shape[1]), layout=layout, coords=coords)
                own = part.to_slice(param, state, shape, DType.FLOAT32)
                yield LoadItem(name=param, slice=own, source=source)
                at += ref.nbytes


def main(repeats: int) -> None:
    """Print the processor time of a plan, up to the first window."""
    cases = {
        "all ranks hold all": (AxisLayout("dp", RANKS, Replicate()), RANKS),
        "each holds some rows of all": (AxisLayout("dp", RANKS, Chunk(0)), 1),
        "eight hold the same rows": (AxisLayout("dp", RANKS // 8, Chunk(0)), 8),
    }
    for name, (axis, copies) in cases.items():
        items = list(items_of(TENSORS, Layout((axis,)), {"dp": 0}))
        seconds = median(_plan(items, Played(RANKS, copies)) for _ in range(repeats))
        print(f"{name:<28} {len(items):,} of {RANKS:,} ranks: {seconds:.2f} CPU s")


def _plan(items: Sequence[LoadItem], ranks: Played) -> float:
    began = time.process_time()
    stages = plan_stages(items, ranks, exchange=Exchange.ALWAYS, memory=1 << 30)
    next(stages[0].windows())
    return time.process_time() - began
