"""Tensors as references (where their elements lie, never the elements themselves), and their element types.

>>> ref = TensorRef(path="a.pt", offset=64, dtype=DType.FLOAT32, shape=(2, 4), strides=(4, 1))
>>> ref.nbytes, ref.is_contiguous
(32, True)
>>> DType("bfloat16").itemsize, DType.from_safetensors("BF16")
(2, <DType.BFLOAT16: 'bfloat16'>)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import prod
from operator import mul

GAP = 4 << 10
"""Two ranges of a file with at least so many bytes between them are read separately; nearer ones in a single read."""


class DType(StrEnum):
    """Element type; the value is the name of the torch dtype."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """Whether it is a real floating-point type; only these are cast."""
        return self.value.startswith(("float", "bfloat"))

    @property
    def safetensors(self) -> str:
        """Code of this type in a safetensors header (safetensors 0.4-0.8), e.g. "BF16"."""
        return _SAFETENSORS[self]

    @classmethod
    def from_name(cls, name: str) -> DType | None:
        """The type with this name, in full, abbreviated or as torch prints it; None for an unknown name.

        >>> DType.from_name("bf16"), DType.from_name("torch.float32"), DType.from_name("float")
        (<DType.BFLOAT16: 'bfloat16'>, <DType.FLOAT32: 'float32'>, None)
        """
        plain = name.removeprefix("torch.")
        full = _SHORT.get(plain, plain)
        return cls(full) if full in set(cls) else None

    @classmethod
    def from_safetensors(cls, code: str) -> DType:
        """Type for a safetensors code. Raises KeyError for an unknown code."""
        return _FROM_SAFETENSORS[code]


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

_ITEMSIZE = {dtype: 1 if dtype is DType.BOOL else int(re.findall(r"\d+", dtype)[0]) // 8 for dtype in DType}
_SAFETENSORS = {
    dtype: re.sub(r"LOAT|OMPLEX|(?<=U)INT|(?<=I)NT", "", dtype.upper()).removesuffix("FN") for dtype in DType
}
_FROM_SAFETENSORS = {code: dtype for dtype, code in _SAFETENSORS.items()}


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last of a tensor, both included; 0 for an empty tensor, -1 for an impossible one.

    Cached: a model has few shapes.
    """
    if len(shape) != len(strides) or min((0, *shape, *strides)) < 0:
        return -1
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """Elements of one tensor in one file."""

    path: str
    """File: an absolute path in a source, a relative one in a destination."""
    offset: int
    """Byte in the file where element [0, ..., 0] starts."""
    dtype: DType
    """Element type as stored."""
    shape: tuple[int, ...]
    """Elements per dim."""
    strides: tuple[int, ...]
    """Elements to step in the file, per dim; never negative."""
    codec: str = ""
    """Name of the codec of the encoded block at `offset`; empty for raw elements."""
    codec_nbytes: int = 0
    """Bytes of the encoded block."""
    codec_start: int = 0
    """Byte of the decoded block where element [0, ..., 0] starts."""
    patched_nbytes: int = 0
    """Bytes of the whole tensor that the block is a patch of; 0 if it is no patch."""

    def __post_init__(self) -> None:
        if self.offset < 0 or _span(self.shape, self.strides) < 0:
            raise ValueError(f"not a tensor reference: {self!r}")

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without gaps."""
        return self.numel * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last, with gaps; 0 for an empty tensor."""
        return _span(self.shape, self.strides) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without a gap."""
        expected = contiguous_strides(self.shape)
        if self.strides == expected or self.numel == 0:
            return True
        return all(n == 1 or s == e for n, s, e in zip(self.shape, self.strides, expected, strict=True))

    def narrow(self, offsets: Sequence[int], sizes: tuple[int, ...]) -> TensorRef:
        """The box of elements that starts at `offsets` and has `sizes`.

        >>> ref = TensorRef(path="a.pt", offset=64, dtype=DType.FLOAT32, shape=(2, 3), strides=(3, 1))
        >>> ref.narrow((1, 1), (1, 2)).offset
        80
        """
        if sizes == self.shape:
            return self
        return self.strided(sum(map(mul, offsets, self.strides)) if prod(sizes) else 0, sizes, self.strides)

    def strided(self, start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> TensorRef:
        """A view of these sizes and strides from element `start` on. Raises TypeError for encoded elements."""
        if self.codec:
            raise TypeError(f"expected raw elements; got {self!r}")
        offset = self.offset + start * self.dtype.itemsize
        return TensorRef(path=self.path, offset=offset, dtype=self.dtype, shape=sizes, strides=strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineTensor:
    """A tensor kept in the index itself: a step count that was a Python number, or one value for all elements.

    >>> InlineTensor(data=bytes(4), dtype=DType.FLOAT32, shape=(512, 1024), repeats=True).strides
    (0, 0)
    """

    data: bytes
    """Little-endian elements, row-major."""
    dtype: DType
    """Element type."""
    shape: tuple[int, ...] = ()
    """Elements per dim."""
    repeats: bool = False
    """Whether `data` is a single element, the value of every element."""

    def __post_init__(self) -> None:
        if len(self.data) != (1 if self.repeats else prod(self.shape)) * self.dtype.itemsize:
            raise ValueError(f"{len(self.data)} bytes do not hold {self.shape} of {self.dtype}")

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements to step in `data` per dim."""
        return (0,) * len(self.shape) if self.repeats else contiguous_strides(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether `data` holds every element, in row-major order."""
        return not self.repeats


Tensor = TensorRef | InlineTensor


def select_elements(ref: Tensor, first: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A view of a stored tensor: the elements from number `first` on, with these sizes and strides."""
    if isinstance(ref, InlineTensor) and ref.repeats:
        return replace(ref, shape=sizes)
    if isinstance(ref, InlineTensor):
        item = ref.dtype.itemsize
        starts = (offset * item for offset in list_offsets(sizes, strides, first=first))
        return replace(ref, data=b"".join(ref.data[start : start + item] for start in starts), shape=sizes)
    if ref.codec:
        skipped = first * ref.dtype.itemsize
        return replace(ref, codec_start=ref.codec_start + skipped, shape=sizes, strides=strides)
    return ref.strided(first, sizes, strides)


def list_offsets(sizes: Sequence[int], strides: Sequence[int], *, first: int) -> list[int]:
    """Offsets of all elements of a strided view, in row-major order.

    >>> list_offsets((2, 3), (100, 10), first=5)
    [5, 15, 25, 105, 115, 125]
    """
    starts = [first]
    for count, step in zip(sizes, strides, strict=True):
        starts = [start + number * step for start in starts for number in range(count)]
    return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A byte range of a source file with a recorded checksum (a member of a zip archive)."""

    path: str
    """File."""
    name: str
    """Name of the range, for messages."""
    offset: int
    """First byte."""
    nbytes: int
    """Bytes."""
    crc32: int
    """CRC-32 of these bytes, as in a zip archive."""
