"""Whether a master is that of a weight: cast to the type of the model, they are equal bit for bit.

Three windows are compared, at both ends and in the middle; all elements are, later, when copies are compared.
"""

from __future__ import annotations

from ucp.core.dtypes import DType
from ucp.core.tensor import TensorRef
from ucp.transfer.probe import Prober

__all__ = ["WINDOW", "is_master_of", "mark"]

WINDOW = 64
"""Elements compared at once."""


def is_master_of(master: TensorRef, weight: TensorRef, prober: Prober) -> bool:
    """Whether `master`, as many elements, holds `weight` in higher precision."""
    if master.numel != weight.numel:
        return False
    for start in _starts(weight.numel):
        stop = min(start + WINDOW, weight.numel)
        held = prober.window(master, start, stop, dtype=weight.dtype)
        if held != prober.window(weight, start, stop, dtype=weight.dtype):
            return False
    return True


def mark(tensor: TensorRef, dtype: DType, prober: Prober) -> bytes:
    """What is compared of a tensor, cast to `dtype`: equal for a master and its weight."""
    windows = ((start, min(start + WINDOW, tensor.numel)) for start in _starts(tensor.numel))
    return b"".join(prober.window(tensor, start, stop, dtype=dtype) for start, stop in windows)


def _starts(numel: int) -> list[int]:
    last = max(numel - WINDOW, 0)
    return sorted({0, last // 2, last})
