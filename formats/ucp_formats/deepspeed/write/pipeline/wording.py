"""Layers and stages for messages: whole ranges in place of one number after another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

__all__ = ["layers_shown", "numbers_shown"]

_MANY = 5
"""Stages of as many layers, one after another, that are shown as one."""


def numbers_shown(numbers: Iterable[int]) -> str:
    """Numbers, those that follow each other as a range.

    >>> numbers_shown([7, 0, 1, 2])
    '0-2, 7'
    """
    runs = groupby(enumerate(sorted(set(numbers))), key=lambda item: item[1] - item[0])
    found = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{own[0]}-{own[-1]}" if len(own) > 1 else str(own[0]) for own in found)


def layers_shown(bounds: Sequence[int]) -> str:
    """Layers of each stage, and what `--set` calls them: it takes no stage without a layer.

    >>> layers_shown([0, 3, 4]), layers_shown([0, 1, 1, 1])
    ('layers 0-2 | 3 (stages=0,3,4)', 'layers 0 | none in 2 stages')
    """
    shown = []
    for length, run in groupby(pairwise(bounds), key=lambda span: span[1] - span[0]):
        own = list(run)
        if not length:
            shown.append("none" if len(own) == 1 else f"none in {len(own)} stages")
        elif len(own) >= _MANY:
            shown.append(f"{own[0][0]}-{own[-1][1] - 1} in {len(own)} stages of {length}")
        else:
            shown += [numbers_shown(range(start, stop)) for start, stop in own]
    said = f" (stages={','.join(map(str, bounds))})"
    return f"layers {' | '.join(shown)}{said if bounds[-1] and all(a < b for a, b in pairwise(bounds)) else ''}"
