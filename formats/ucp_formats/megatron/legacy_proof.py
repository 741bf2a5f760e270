"""Whether a master is that of a weight: cast to the type of the model, they are equal bit for bit.

Three windows are compared, at both ends and in the middle; all elements are, later, when copies are compared.
"""

from __future__ import annotations

from ucp.io.probe import Prober
from ucp.tensor import TensorRef

__all__ = ["is_master_of"]

_WINDOW = 64
"""Elements compared at once."""


def is_master_of(master: TensorRef, weight: TensorRef, prober: Prober) -> bool:
    """Whether `master`, as many elements, holds `weight` in higher precision."""
    if master.numel != weight.numel:
        return False
    for start in _starts(weight.numel):
        stop = min(start + _WINDOW, weight.numel)
        held = prober.window(master, start, stop, dtype=weight.dtype)
        if held != prober.window(weight, start, stop, dtype=weight.dtype):
            return False
    return True


def _starts(numel: int) -> list[int]:
    last = max(numel - _WINDOW, 0)
    return sorted({0, last // 2, last})
