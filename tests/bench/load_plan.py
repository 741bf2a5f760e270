"""What it costs one rank to plan a load among many: python -m tests.bench.load_plan [--ranks N] [--tensors N].

Nothing is read. The other ranks are played: each holds what its coordinates say, which for the exchange of digests is
all that matters, so this rank hears from each of them what it would send, and answers.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ucp_patterns.chunk import Chunk
from ucp_patterns.replicate import Replicate

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.live.exchange.stages import plan_stages
from ucp.live.exchange.traffic import Exchange
from ucp.live.parts import LivePart, LoadItem

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
                    dtype=DType.FLOAT32, global_shape=shape, fragments=(Fragment(box=Box.whole(shape), ref=ref),)
                )
                param = f"model.layers.{number // EXPERTS}.mlp.experts.{number % EXPERTS}.{name}.weight"
                rows = -(-shape[0] // (layout.axes[0].parts if isinstance(layout.axes[0].pattern, Chunk) else 1))
                part = LivePart(local_shape=(rows, shape[1]), layout=layout, coords=coords)
                own = part.slice_of(param, state, shape, DType.FLOAT32)
                yield LoadItem(name=param, slice=own, source=source)
                at += ref.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=150_000)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    cases = {
        "all ranks hold all": (AxisLayout("dp", asked.ranks, Replicate()), asked.ranks),
        "each holds a row block of all": (AxisLayout("dp", asked.ranks, Chunk(0)), 1),
        "eight hold the same": (AxisLayout("dp", asked.ranks // 8, Chunk(0)), 8),
    }
    for name, (axis, copies) in cases.items():
        items = list(items_of(asked.tensors, Layout((axis,)), {"dp": 0}))
        profile = cProfile.Profile()
        if asked.profile:
            profile.enable()
        began = time.process_time()
        stages = plan_stages(items, Played(asked.ranks, copies), exchange=Exchange.ALWAYS, memory=1 << 30)
        first = next(stages[0].windows(), None)
        seconds = time.process_time() - began
        profile.disable()
        print(f"{name}: {len(items):,} items, {len(stages)} stages, {first is not None}: {seconds:.2f} s")
        if asked.profile:
            pstats.Stats(profile, stream=sys.stdout).sort_stats("cumtime").print_stats(22)


if __name__ == "__main__":
    main()
