"""How DeepSpeed deals layers out to the stages of a pipeline: bounds `[0, 3, 5, 9]` are stages of 3, 2 and 4 layers.

Both functions give what those of their name in runtime/utils.py (0.19.8) give, ties included, without numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

__all__ = ["balanced_bounds", "uniform_bounds"]

Bounds = tuple[int, ...]
"""First layer of each stage, and the number of layers."""


def uniform_bounds(layers: int, stages: int) -> Bounds:
    """Bounds of stages with as many layers each, the first ones with one more (`partition_uniform`).

    Stages come out empty where there are fewer layers than stages.

    >>> uniform_bounds(8, 3)
    (0, 3, 6, 8)
    """
    if layers <= stages:
        return tuple(min(stage, layers) for stage in range(stages + 1))
    each, more = divmod(layers, stages)
    return tuple(each * stage + min(stage, more) for stage in range(stages + 1))


def balanced_bounds(weights: Sequence[int], stages: int) -> Bounds:
    """Bounds under which the heaviest stage is the least heavier than the lightest (`partition_balanced`).

    `weights`: one per layer. Of several such bounds, stages take the fewest layers from the last one on.

    >>> balanced_bounds([88, 72, 0, 16, 72, 88], 2)
    (0, 4, 6)
    """
    count = len(weights)
    if count <= stages:
        return uniform_bounds(count, stages)
    before = list(accumulate(weights, initial=0))
    best: dict[tuple[int, int], tuple[float, float, int]] = {(0, 0): (0, inf, 0)}
    for stop in range(1, count + 1):
        for number in range(1, min(stop, stages) + 1):
            best[stop, number] = _last_stage(best, before, stop, number)
    bounds = [count]
    for number in range(stages, 0, -1):
        bounds.append(best[bounds[-1], number][2])
    return tuple(reversed(bounds))


def _last_stage(
    best: dict[tuple[int, int], tuple[float, float, int]], before: Sequence[int], stop: int, number: int
) -> tuple[float, float, int]:
    """Weights of the heaviest and lightest of the `number` stages of the first `stop` layers, and the last's start."""
    found, least = (inf, inf, 0), inf
    for start in range(stop):
        if (start, number - 1) not in best:
            continue
        heaviest, lightest, _ = best[start, number - 1]
        own = before[stop] - before[start]
        most, fewest = max(heaviest, own), min(lightest, own)
        if most - fewest <= least:
            found, least = (most, fewest, start), most - fewest
    return found
