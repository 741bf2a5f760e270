"""Ranks that are threads of one process: the in-memory adapter of the port `ucp.live.run.ranks.Ranks`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class ThreadRanks:
    """One of several threads that meet at a barrier."""

    def __init__(self, rank: int, count: int, barrier: threading.Barrier, table: list[object]) -> None:
        self.rank = rank
        self.count = count
        self.device = torch.device("cpu")
        self.gatherings = 0
        """Buckets that were exchanged."""
        self._barrier = barrier
        self._table = table

    def share(self, value: T) -> list[T]:
        self._table[self.rank] = value
        self._barrier.wait(timeout=60)
        values = list(self._table)
        self._barrier.wait(timeout=60)
        return values

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self.gatherings += 1
        return torch.stack(self.share(part.clone()))


def run(count: int, work: Callable[[ThreadRanks], T]) -> list[T | Exception]:
    """What `work` returns or raises on each of `count` ranks."""
    barrier, table = threading.Barrier(count), [None] * count

    def one(rank: int) -> T | Exception:
        try:
            return work(ThreadRanks(rank, count, barrier, table))
        except Exception as error:  # noqa: BLE001  # the test looks at what each rank raised
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
