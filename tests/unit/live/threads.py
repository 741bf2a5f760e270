"""Ranks that are threads of one process: the in-memory adapter of the port `ucp.live.run.ranks.Ranks`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

T = TypeVar("T")

Boxes = defaultdict[tuple[int, int], "SimpleQueue[Any]"]
"""What was sent and not received yet, by sender and receiver."""

WAIT = 60
"""Seconds after which a rank that waits has been left alone: the test fails."""


class ThreadRanks:
    """One of several threads that send each other what they have."""

    def __init__(self, rank: int, count: int, boxes: Boxes) -> None:
        self.rank = rank
        self.count = count
        self.device = torch.device("cpu")
        self.gathered: list[tuple[int, ...]] = []
        """Who took part in each gathering."""
        self._boxes = boxes

    def share(self, value: T) -> list[T]:
        return self._send_round([value] * self.count, range(self.count))

    def swap(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        return self._send_round([part.copy() for part in parts], range(self.count))

    def gather(self, part: torch.Tensor, whole: torch.Tensor, members: Sequence[int]) -> None:
        self.gathered.append(tuple(members))
        for row, own in zip(whole, self._send_round([part.clone()] * len(members), members), strict=True):
            row.copy_(own)

    def _send_round(self, values: Sequence[T], members: Sequence[int]) -> list[T]:
        for value, member in zip(values, members, strict=True):
            self._boxes[self.rank, member].put(value)
        return [self._boxes[member, self.rank].get(timeout=WAIT) for member in members]


def run(count: int, work: Callable[[ThreadRanks], T]) -> list[T | Exception]:
    """What `work` returns or raises on each of `count` ranks; nothing that was sent may be left over."""
    boxes: Boxes = defaultdict(SimpleQueue)
    for pair in ((one, other) for one in range(count) for other in range(count)):
        boxes[pair]

    def one(rank: int) -> T | Exception:
        try:
            return work(ThreadRanks(rank, count, boxes))
        except Exception as error:  # noqa: BLE001  # the test looks at what each rank raised
            return error

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(one, range(count)))
    assert all(box.empty() for box in boxes.values()), "a rank sent what no other expected"
    return found
