"""What tensor-parallel ranks have of the models of the DeepSpeed fixtures, written down by hand from their code.

The 3D pipeline cuts as `fixtures/make/deepspeed/deepspeed_parallel.py` does, AutoTP as the partition of `autotp` in
`fixtures/make/deepspeed/deepspeed_cases.py` says.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]

DIM = (
    (re.compile(r"tied_modules\.embed\."), 0, (1,)),
    (re.compile(r"\d+\.qkv\."), 0, (2, 1, 1)),
    (re.compile(r"\d+\.gate_up\."), 0, (1, 1)),
    (re.compile(r"\d+\.(dense|down)\.weight"), 1, (1,)),
    (re.compile(r"block\.(q|k|v|up)\."), 0, (1,)),
    (re.compile(r"block\.(o|down)\.weight"), 1, (1,)),
)
"""Names, the dim they are cut along, and the relative lengths of blocks that are each cut on their own."""


def cut(name: str, whole: Words, rank: int, tp: int) -> Words:
    """What tensor-parallel rank `rank` of `tp` has of a tensor; all of it where nothing cuts it."""
    found = next(((dim, blocks) for pattern, dim, blocks in DIM if pattern.match(name)), None)
    if found is None or tp == 1:
        return whole
    dim, blocks = found
    length = whole.shape[dim] // sum(blocks)
    edges = [length * sum(blocks[:number]) for number in range(1, len(blocks))]
    return np.concatenate([np.split(part, tp, axis=dim)[rank] for part in np.split(whole, edges, axis=dim)], axis=dim)
