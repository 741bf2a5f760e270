"""A cache that keeps what was used most often, and forgets old uses (MoESys, algorithm 2).

The algorithm as printed evicts several entries for one, never fills the last place, and does not count the first use
of an entry; this is what it says in words, without its write-back, as nothing changes a streamed weight. See
docs/explanation/papers.md.

>>> cache = Cache(3, lambda key, kept: key, decay=0.5, period=4)
>>> _ = [cache.get(key) for key in "aabacdaeab"]
>>> cache.misses, sorted(cache)
(6, ['a', 'b', 'e'])

A model uses its experts layer after layer, so that each new one would drop the one that is needed soonest. With
`history`, uses of dropped values count, too, and a value is only dropped for one that was used more often:

>>> cache = Cache(2, lambda key, kept: key, history=True)
>>> _ = [cache.get(key) for key in "abcdabcdabcd"]
>>> cache.hits
4
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Values by key, at most `capacity` of them."""

    def __init__(
        self,
        capacity: int,
        read: Callable[[K, bool], V],
        *,
        history: bool = False,
        decay: float = 0.5,
        period: int = 1024,
        release: Callable[[V], None] | None = None,
    ) -> None:
        """`read(key, kept)` gives a value, and is told whether the cache keeps it.

        `release` takes a value that leaves the cache. Every `period` calls of `get`, the uses of all keys are
        multiplied by `decay`.
        """
        self.hits = self.misses = 0
        self._capacity, self._read, self._release = capacity, read, release
        self._history, self._decay, self._period, self._calls = history, decay, period, 0
        self._values: dict[K, V] = {}
        self._uses: dict[K, float] = {}
        self.in_use: Collection[K] = ()
        """Keys that do not leave the cache."""

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def keeps(self, key: K) -> bool:
        """Whether `get` would keep the value of `key`."""
        if key in self._values or len(self._values) < self._capacity:
            return True
        rarest = self._find_rarest()
        if rarest is None:
            return False
        return not self._history or self._uses.get(key, 0) + 1 > self._uses[rarest]

    def get(self, key: K) -> V:
        """The value of `key`, which is read if it is not there."""
        self._calls += 1
        if key in self._values:
            self.hits += 1
            self._uses[key] += 1
            value = self._values[key]
        else:
            self.misses += 1
            kept = self.keeps(key)
            if kept and len(self._values) == self._capacity and (rarest := self._find_rarest()) is not None:
                self._evict(rarest)
            value = self._read(key, kept)
            self._uses[key] = self._uses.get(key, 0) + 1 if self._history else 1.0
            if kept:
                self._values[key] = value
        if self._calls % self._period == 0:
            self._uses = {used: uses * self._decay for used, uses in self._uses.items()}
        return value

    def _find_rarest(self) -> K | None:
        """The key with the fewest uses that may leave the cache; of several, the oldest."""
        return min((key for key in self._values if key not in self.in_use), key=self._uses.__getitem__, default=None)

    def _evict(self, key: K) -> None:
        value = self._values.pop(key)
        if self._release is not None:
            self._release(value)
