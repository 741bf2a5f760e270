r"""Reads a few elements of a tensor to recognise it, for layouts that record no names.

If a checkpoint does not record which part of a flat buffer is which parameter, the contents show it: an fp32 master,
cast to the dtype of the model, equals the model's weight bit for bit. Windows of a few hundred bytes are read for that.

>>> nan, one = b"\0\0\xc0\x7f", b"\0\0\x80\x3f"
>>> cast_bits(one + nan, DType.FLOAT32, DType.BFLOAT16).hex()
'803fc07f'
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Self

from ucp.core.index import StateIndex
from ucp.core.slices import Locator, resolve
from ucp.core.target import full_slice
from ucp.core.tensor import DType, Tensor, TensorRef
from ucp.io.files import Sources
from ucp.transfer.gather import Gatherer

_SHORT = 1 << 10
"""Up to so many bytes, elements are cast one by one: numpy is not faster, and its import takes a tenth of a second."""

_INFINITE, _NAN = 0x7F800000, 0x7FC0
"""Bits of infinity in float32, and of NaN in bfloat16."""


class Prober:
    """Reads windows of tensors; files stay open between reads."""

    def __init__(self) -> None:
        self._gatherer = Gatherer(sources=Sources())

    @property
    def nbytes_read(self) -> int:
        """Bytes read so far."""
        return self._gatherer.nbytes_read

    def window(self, tensor: Tensor, start: int, stop: int, *, dtype: DType | None = None) -> bytes:
        """Elements `start` to `stop` of `tensor` in row-major order, as bytes, cast to `dtype` if one is given.

        If a `dtype` is given, even the tensor's, all NaNs get the same bits, so that values cast elsewhere compare
        equal (`cast_bits`).

        Raises ValueError for a range outside the tensor, SourceError if it cannot be read.
        """
        if not 0 <= start <= stop <= tensor.numel:
            raise ValueError(f"expected elements of a tensor of {tensor.numel}; got {start}:{stop}")
        if isinstance(tensor, TensorRef) and tensor.is_contiguous and not tensor.codec:
            first, nbytes = (n * tensor.dtype.itemsize for n in (start, stop - start))
            self._gatherer.nbytes_read += nbytes
            data = self._gatherer.sources.get(tensor.path).read(tensor.offset + first, nbytes)
            return data if dtype is None else cast_bits(data, tensor.dtype, dtype)
        return self.state_window(StateIndex.from_tensor(tensor), start, stop, dtype=dtype)

    def state_window(self, state: StateIndex, start: int, stop: int, *, dtype: DType | None = None) -> bytes:
        """`window` of a state, whatever its fragments are. Raises SourceError, CoverError."""
        pieces = resolve(full_slice("", "", state), Locator(state), start, stop)
        data = bytes(self._gatherer.read([(stop - start, state.dtype, pieces)])[0])
        return data if dtype is None else cast_bits(data, state.dtype, dtype)

    def read_joined(self, tensors: Sequence[Tensor], start: int, stop: int, *, dtype: DType | None = None) -> bytes:
        """`window` of the concatenation of `tensors`."""
        parts, base = [], 0
        for tensor in tensors:
            low, high = max(start - base, 0), min(stop - base, tensor.numel)
            if low < high:
                parts.append(self.window(tensor, low, high, dtype=dtype))
            base += tensor.numel
        return b"".join(parts)

    def close(self) -> None:
        """Close all files."""
        self._gatherer.sources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cast_bits(data: bytes, dtype: DType, to: DType) -> bytes:
    """Elements of `dtype` cast to `to`, rounded as torch rounds: to the nearest, ties to even.

    Values too large for `to` become infinite. All NaNs get the same bits, even if `dtype` is `to`: the bits that torch
    gives a NaN depend on the processor, and on how many elements are cast at once.
    """
    if dtype is to and not dtype.is_floating:
        return data
    if len(data) <= _SHORT and to is DType.BFLOAT16:  # element by element
        if dtype is DType.FLOAT32:
            words = memoryview(data).cast("I")
            halves = (_NAN if w & 0x7FFFFFFF > _INFINITE else w + 0x7FFF + (w >> 16 & 1) >> 16 for w in words)
            return array("H", halves).tobytes()
        if dtype is to and all(w & 0x7FFF <= _INFINITE >> 16 for w in memoryview(data).cast("H")):
            return data
    import numpy as np

    from ucp.io.elements import assign, numpy_dtype, viewed  # numpy is imported when it is needed

    values = viewed(memoryview(data), dtype)
    if dtype is to and not np.isnan(values).any():
        return data
    out = np.empty(values.shape, dtype=numpy_dtype(to))
    assign(out, values)
    wrong = np.isnan(values)
    if wrong.any():
        out[wrong] = np.nan
    return out.tobytes()
