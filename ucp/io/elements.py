"""The few operations on elements that are more than copies of bytes: strides, casts, means, comparison, compression.

An encoded block holds its elements in planes, compressed with zstd. Plane `i` holds byte `i` of every element: the high
bytes of neighbouring floats (sign, exponent) are alike, so they compress well side by side.

>>> data = bytes(range(8)) * 100
>>> bytes(decode_block(memoryview(encode_block(memoryview(data), 4)), codec_name(4))) == data
True

numpy and ml_dtypes (bfloat16, float8) are imported on first use, so that plain copies start without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ucp.core.tensor import DType
from ucp.errors import CorruptError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WINDOW = 1 << 16
"""Elements that are processed together: temporary arrays are larger than the elements, so few at a time."""

_PREFIX = "zstd-planes"
_LEVEL = 3
_MOST_NBYTES = 64 << 20
"""Bytes of a decoded block, at most: a damaged length must not ask for all memory."""
_WIDTHS = ("1", "2", "4", "8", "16")


@cache
def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Numpy type of the same elements."""
    import numpy as np

    if dtype.value.startswith(("bfloat", "float8")):
        import ml_dtypes

        numpy_type: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.value))
        return numpy_type
    return np.dtype(dtype.value)


def viewed(data: memoryview, dtype: DType) -> NDArray[Any]:
    """The bytes as a 1-D array of elements; shares memory."""
    import numpy as np

    return np.frombuffer(data, dtype=numpy_dtype(dtype))


def strided(
    data: memoryview, dtype: DType, *, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[Any]:
    """View of elements in a buffer. `offset`, `strides`: bytes; `sizes`: elements per dim; shares memory."""
    import numpy as np

    return np.ndarray(sizes, dtype=numpy_dtype(dtype), buffer=data, offset=offset, strides=strides)


def widened(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The values in a wider type; NaNs of any kind stay NaNs, without a warning."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        return values.astype(dtype)


def assign(target: NDArray[Any], values: NDArray[Any]) -> None:
    """Put `values` into `target`, cast to its type; what is too large for it becomes infinite, as in torch."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = values


def add(sums: NDArray[Any], values: NDArray[Any], *, fraction: float = 1.0) -> None:
    """Add `values`, or that fraction of them, to `sums` in place and in their type; too large a sum is infinite."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        if fraction == 1.0:
            np.add(sums, values, out=sums, dtype=sums.dtype, casting="same_kind")
            return
        rows = max(1, _WINDOW * len(values) // max(values.size, 1))
        for low in range(0, len(values), rows):
            part = values[low : low + rows].astype(sums.dtype) * fraction
            sums[low : low + rows] += part


def fraction_of(count: int) -> float:
    """A power of two so small that the sum of `count` finite numbers, each multiplied by it, is finite.

    >>> fraction_of(3), fraction_of(4)
    (0.125, 0.0625)
    """
    return 0.5 ** (count.bit_length() + 1)


def enlarge(values: NDArray[Any], *, by: float) -> None:
    """Multiply floating-point values in place; finite ones are limited to the largest number of their type."""
    import numpy as np

    parts = values.view(values.real.dtype)  # real and imaginary parts of complex numbers
    most = np.finfo(parts.dtype).max / by
    for low in range(0, parts.size, _WINDOW):
        part = parts[low : low + _WINDOW]
        np.clip(part, -most, most, out=part, where=np.isfinite(part))
        part *= by


def mean_dtype(dtypes: Iterable[DType]) -> DType:
    """Type in which a mean of elements of `dtypes` is summed: float32, or wider if that would lose digits.

    >>> mean_dtype([DType.BFLOAT16]), mean_dtype([DType.INT64])
    (<DType.FLOAT32: 'float32'>, <DType.FLOAT64: 'float64'>)
    """
    distinct = set(dtypes)
    if distinct & {DType.COMPLEX64, DType.COMPLEX128}:
        return DType.COMPLEX128
    exact = all(dtype.is_floating and dtype is not DType.FLOAT64 for dtype in distinct)
    return DType.FLOAT32 if exact else DType.FLOAT64


class Difference(NamedTuple):
    """How two arrays of the same elements differ."""

    numel: int
    """Elements whose bits differ."""
    first: int
    """Row-major position of the first of them."""
    largest: float
    """Largest absolute difference of value; NaN if one of the two is NaN."""
    norm: float
    """Euclidean norm of the difference."""


def differing(a: NDArray[Any], b: NDArray[Any]) -> Difference | None:
    """Where `a` and `b`, of one type and shape, differ in their bits; None if they are equal."""
    import numpy as np

    plain = a.ndim == 1 and a.flags.c_contiguous and b.flags.c_contiguous and a.nbytes % 8 == 0
    if plain and np.array_equal(a.view(np.uint64), b.view(np.uint64)):
        return None
    raw = np.dtype(f"V{a.dtype.itemsize}") if a.dtype.itemsize > 8 else np.dtype(f"u{a.dtype.itemsize}")
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    differences: list[Difference] = []
    for low in range(0, flat_a.size, _WINDOW):
        one, other = flat_a[low : low + _WINDOW], flat_b[low : low + _WINDOW]
        where = np.flatnonzero(one.view(raw) != other.view(raw))
        if where.size:
            with np.errstate(invalid="ignore", over="ignore"):
                gaps = np.abs(one[where].astype(wide) - other[where].astype(wide))
                largest, norm = float(np.max(gaps)), float(np.linalg.norm(gaps))
            first = low + int(where[0])
            differences.append(Difference(numel=int(where.size), first=first, largest=largest, norm=norm))
    if not differences:
        return None
    largest = float(np.max([difference.largest for difference in differences]))  # NaN stays NaN
    return Difference(
        numel=sum(difference.numel for difference in differences),
        first=differences[0].first,
        largest=largest,
        norm=math.hypot(*(difference.norm for difference in differences)),
    )


def without_payloads(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """`a`, with the bits of `b` where both are NaN."""
    import numpy as np

    merged: NDArray[Any] = np.where(np.isnan(a) & np.isnan(b), b, a)
    return merged


def codec_name(itemsize: int) -> str:
    """Name of the codec for elements of `itemsize` bytes."""
    return f"{_PREFIX}{itemsize}"


def encode_block(data: memoryview, itemsize: int) -> bytes:
    """`data` in planes, compressed; at least one element."""
    import numpy as np
    import zstandard

    planes = np.frombuffer(data, dtype=np.uint8).reshape(-1, itemsize).T
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(planes.tobytes())


def decode_block(data: memoryview, codec: str) -> memoryview:
    """The data that `encode_block` encoded. Raises CorruptError if `data` is not such a block."""
    import numpy as np
    import zstandard

    width = codec.removeprefix(_PREFIX)
    if not codec.startswith(_PREFIX) or width not in _WIDTHS:
        raise CorruptError(f"expected a block encoded with {_PREFIX}N; got {codec!r}. It needs a newer ucp")
    try:
        nbytes = zstandard.frame_content_size(data)
        if not 0 < nbytes <= _MOST_NBYTES or nbytes % int(width):
            raise CorruptError(f"expected a compressed block of elements of {width} bytes; got one of {nbytes} bytes")
        raw = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a compressed block does not decode: {error}") from error
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(int(width), -1)
    return memoryview(planes.T.tobytes())
