"""How likely it is that every expert is left after some nodes are lost, and exchanges that make it likelier.

An expert is lost if all nodes that hold it are. Nodes of an expert are a mask: bit n for node n.

>>> LostNodes.of(2).survival({0b01, 0b11})  # one expert on the first node, one on both
(1.0, 0.5, 0.0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

_MOST_EXACT = 20
"""Nodes up to which every set of lost nodes is looked at."""
_SAMPLES = 2048
"""Sets of a size that are drawn where there are more nodes, unless there are fewer sets of that size."""
_WORK = 1 << 22
"""Sets of lost nodes that one search for exchanges may look at, over all exchanges that it tries."""


@dataclass(frozen=True, slots=True, eq=False)
class LostNodes:
    """Sets of lost nodes: all that there are, or a sample."""

    lost: NDArray[np.bool_]
    """[nodes, sets]: whether a node is in a set."""
    sizes: NDArray[np.intp]
    """Nodes in each set."""
    weights: NDArray[np.float64]
    """Weight of each set: all sets of a size weigh 1 together."""

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, nodes: int) -> LostNodes:
        """Sets of lost nodes out of `nodes`: all up to 20 nodes, then a sample that is always the same."""
        if nodes <= _MOST_EXACT:
            numbers = np.arange(1 << nodes)
            lost = np.stack([numbers >> node & 1 == 1 for node in range(nodes)])
        else:
            lost = np.concatenate([_draw(nodes, size) for size in range(nodes + 1)], axis=1)
        sizes = lost.sum(axis=0)
        return cls(lost=lost, sizes=sizes, weights=1.0 / np.bincount(sizes)[sizes])

    def losing(self, mask: int) -> NDArray[np.bool_]:
        """In which sets all nodes of `mask` are."""
        nodes = [node for node in range(len(self.lost)) if mask >> node & 1]
        return np.asarray(np.logical_and.reduce(self.lost[nodes], axis=0), dtype=np.bool_)

    def fatal(self, masks: Collection[int]) -> NDArray[np.bool_]:
        """Which sets lose an expert. `masks`: nodes of each expert."""
        fatal = np.zeros(self.lost.shape[1], dtype=bool)
        for mask in set(masks):
            fatal |= self.losing(mask)
        return fatal

    def survival(self, masks: Collection[int]) -> tuple[float, ...]:
        """Probability that no expert is lost, for 0 lost nodes to all of them."""
        return self.rate(self.fatal(masks))

    def rate(self, fatal: NDArray[np.bool_]) -> tuple[float, ...]:
        """Share of sets that are not fatal, by their size."""
        counts = np.bincount(self.sizes)
        return tuple((1 - np.bincount(self.sizes[fatal], minlength=len(counts)) / counts).tolist())

    def score(self, fatal: NDArray[np.bool_]) -> float:
        """Share of fatal sets, the mean over their sizes: 0 at best."""
        return float(self.weights @ fatal) / len(self.lost)


def _draw(nodes: int, size: int) -> NDArray[np.bool_]:
    """[nodes, sets]: all sets of `size` nodes, or a sample of them."""
    count = comb(nodes, size)
    if count <= _SAMPLES:
        chosen = np.array(list(combinations(range(nodes), size)), dtype=np.intp).reshape(count, size)
    else:
        generator = np.random.default_rng([nodes, size])
        chosen = generator.random((_SAMPLES, nodes)).argpartition(size, axis=1)[:, :size]
    lost = np.zeros((nodes, len(chosen)), dtype=bool)
    lost[chosen, np.arange(len(chosen))[:, None]] = True
    return lost


def mask_of(nodes: Collection[int]) -> int:
    """The mask of some nodes."""
    return sum(1 << node for node in set(nodes))


def exchange_slots(slots: Sequence[Sequence[int]]) -> list[list[int]]:
    """The placement after exchanges of two slots, each the best there is, until none helps.

    `slots`: experts on each node. Where sets of lost nodes are many, only some exchanges are tried, those of experts on
    few nodes first. What is returned is never worse.
    """
    sets = LostNodes.of(len(slots))
    search = _Search(sets, [list(experts) for experts in slots])
    trials = max(_WORK // sets.lost.shape[1], 1)
    while trials > 0:
        best: tuple[float, tuple[int, int, int, int]] | None = None
        for exchange in search.exchanges():
            score = search.score_after(exchange)
            trials -= 1
            if score < search.best - 1e-12 and (best is None or score < best[0]):
                best = score, exchange
            if trials <= 0:
                break
        if best is None:
            break
        search.apply(best[1])
    return search.slots


class _Search:
    """A placement that is changed by exchanges: (node, expert there, other node, expert there)."""

    def __init__(self, sets: LostNodes, slots: list[list[int]]) -> None:
        self.sets, self.slots = sets, slots
        self.copies = Counter((expert, node) for node, experts in enumerate(slots) for expert in experts)
        self.masks: dict[int, int] = {}
        for expert, node in self.copies:
            self.masks[expert] = self.masks.get(expert, 0) | 1 << node
        self.losses = np.zeros(sets.lost.shape[1], dtype=np.int32)  # experts that each set loses
        for mask in self.masks.values():
            self.losses += sets.losing(mask)
        self.best = sets.score(self.losses > 0)

    def exchanges(self) -> Iterator[tuple[int, int, int, int]]:
        """Exchanges that change the nodes of an expert, one for each different effect."""
        seen: set[tuple[object, ...]] = set()
        entries = sorted(self.copies, key=lambda entry: (self.masks[entry[0]].bit_count(), entry))
        for (a, i), (b, j) in combinations(entries, 2):
            if a == b or i == j:
                continue
            effect = tuple((self.masks[e], n, self.copies[e, n] > 1) for e, n in ((a, i), (b, j)))
            if effect not in seen:
                seen.update((effect, effect[::-1]))
                yield i, a, j, b

    def score_after(self, exchange: tuple[int, int, int, int]) -> float:
        """The score with an exchange made."""
        i, a, j, b = exchange
        losses = self.losses.copy()
        for expert, left, entered in ((a, i, j), (b, j, i)):
            before, after = self.masks[expert], self._mask_after(expert, left, entered)
            if before != after:
                losses += self.sets.losing(after)
                losses -= self.sets.losing(before)
        return self.sets.score(losses > 0)

    def _mask_after(self, expert: int, left: int, entered: int) -> int:
        mask = self.masks[expert]
        return (mask if self.copies[expert, left] > 1 else mask & ~(1 << left)) | 1 << entered

    def apply(self, exchange: tuple[int, int, int, int]) -> None:
        """Make an exchange."""
        i, a, j, b = exchange
        for expert, left, entered in ((a, i, j), (b, j, i)):
            self.losses -= self.sets.losing(self.masks[expert])
            self.masks[expert] = self._mask_after(expert, left, entered)
            self.losses += self.sets.losing(self.masks[expert])
            self.copies[expert, left] -= 1
            if not self.copies[expert, left]:
                del self.copies[expert, left]
            self.copies[expert, entered] += 1
            self.slots[left].remove(expert)
            self.slots[entered].append(expert)
        self.best = self.sets.score(self.losses > 0)
