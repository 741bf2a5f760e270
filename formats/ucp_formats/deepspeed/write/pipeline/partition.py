"""DeepSpeed's arithmetic for stages: bounds `(0, 3, 5, 9)` are stages of 3, 2 and 4 layers.

Both functions give what those of their name in runtime/utils.py (0.19.8) give, ties included, without numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

__all__ = ["balanced_bounds", "uniform_bounds"]


def uniform_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """Bounds of stages with as many layers each, the first ones with one more (`partition_uniform`).

    Stages come out empty where there are fewer layers than stages.

    >>> uniform_bounds(8, 3)
    (0, 3, 6, 8)
    """
    if layers <= stages:
        return tuple(min(stage, layers) for stage in range(stages + 1))
    each, more = divmod(layers, stages)
    return tuple(each * stage + min(stage, more) for stage in range(stages + 1))


def balanced_bounds(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """Bounds with the smallest difference of the heaviest and the lightest stage (`partition_balanced`).

    `weights`: one per layer. Of several such bounds, the last stages take the fewest layers.

    >>> balanced_bounds([88, 72, 0, 16, 72, 88], 2)
    (0, 4, 6)
    """
    count = len(weights)
    if count <= stages:
        return uniform_bounds(count, stages)
    before = list(accumulate(weights, initial=0))
    best: dict[tuple[int, int], tuple[float, float, int]] = {(0, 0): (0, inf, 0)}  # heaviest, lightest, last start
    for stop in range(1, count + 1):
        for number in range(1, min(stop, stages) + 1):
            ways = (
                (max(best[start, number - 1][0], own), min(best[start, number - 1][1], own), start)
                for start in reversed(range(stop))
                if (start, number - 1) in best
                for own in [before[stop] - before[start]]
            )
            best[stop, number] = min(ways, key=lambda way: way[0] - way[1])
    bounds = [count]
    for number in range(stages, 0, -1):
        bounds.append(best[bounds[-1], number][2])
    return tuple(reversed(bounds))
