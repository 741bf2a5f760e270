"""One number for a whole parameter, such as `step`, as a state of it: a Python number, or a tensor of one element."""

from __future__ import annotations

from struct import pack

from ucp.core.dtypes import DType
from ucp.core.index import StateIndex
from ucp.core.tensor import InlineTensor, TensorRef

__all__ = ["number_state", "scalar_state"]

_PAST_INT64 = 1 << 63
"""One past the largest number of a state that is a Python int."""


def number_state(number: float) -> StateIndex:
    """A Python number as a 0-d state: bool, int64 or float64, so that no bit is lost.

    >>> number_state(3).dtype, number_state(3.0).dtype
    (<DType.INT64: 'int64'>, <DType.FLOAT64: 'float64'>)
    """
    if isinstance(number, bool):
        ref = InlineTensor(data=bytes([number]), dtype=DType.BOOL)
    elif isinstance(number, float):
        ref = InlineTensor(data=pack("<d", number), dtype=DType.FLOAT64)
    else:
        ref = InlineTensor(data=number.to_bytes(8, "little", signed=True), dtype=DType.INT64)
    return StateIndex.whole(ref)


def scalar_state(value: object) -> StateIndex | None:
    """A Python number as a 0-d state, a tensor of one element in its shape; None for anything else."""
    if isinstance(value, float) or (isinstance(value, int) and -_PAST_INT64 <= value < _PAST_INT64):
        return number_state(value)
    return StateIndex.whole(value) if isinstance(value, TensorRef) and value.numel == 1 else None
