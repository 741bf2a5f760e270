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
"""Bytes between two ranges of a file from which on two reads cost less than one that takes what lies between, too."""


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
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """Whether this is a real floating-point type (casts are allowed among these)."""
        return self.value.startswith(("float", "bfloat"))

    @property
    def safetensors(self) -> str:
        """Code of this type in a safetensors header (safetensors 0.4-0.8)."""
        return _SAFETENSORS[self]

    @classmethod
    def from_name(cls, name: str) -> DType | None:
        """Type of that name, in full, short or as torch prints it; None for a name of none.

        >>> DType.named("bf16"), DType.named("torch.float32"), DType.named("float")
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
"""Every name but that of bool has the bits of an element as its first number."""

_SAFETENSORS = {
    DType.FLOAT64: "F64",
    DType.FLOAT32: "F32",
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.FLOAT8_E4M3FN: "F8_E4M3",
    DType.FLOAT8_E4M3FNUZ: "F8_E4M3FNUZ",
    DType.FLOAT8_E5M2: "F8_E5M2",
    DType.FLOAT8_E5M2FNUZ: "F8_E5M2FNUZ",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.INT16: "I16",
    DType.INT8: "I8",
    DType.UINT64: "U64",
    DType.UINT32: "U32",
    DType.UINT16: "U16",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
    DType.COMPLEX64: "C64",
    DType.COMPLEX128: "C128",
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
    for sizes in reversed(shape):
        strides.append(step)
        step *= max(sizes, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """Elements of one tensor in one file."""

    path: str
    """File, absolute for a source; relative to the root of a destination."""
    offset: int
    """Byte offset in the file of element [0, ..., 0]."""
    dtype: DType
    """Element type as stored."""
    shape: tuple[int, ...]
    """Elements per dim."""
    strides: tuple[int, ...]
    """Elements to step in the file per dim; never negative."""
    codec: str = ""
    """Empty: raw elements. Else the name of the block codec that `offset` and `codec_nbytes` go with."""
    codec_nbytes: int = 0
    """Encoded bytes at `offset`, when a codec is named."""
    codec_start: int = 0
    """Byte of the decoded block where element [0, ..., 0] stands, when a codec is named."""

    def __post_init__(self) -> None:
        shape, strides = self.shape, self.strides
        if len(shape) != len(strides) or self.offset < 0 or (shape and (min(shape) < 0 or min(strides) < 0)):
            raise ValueError(f"not a tensor reference: {self!r}")

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps not counted."""
        return self.numel * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last, gaps counted; 0 when empty."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without a gap."""
        wanted = contiguous_strides(self.shape)
        if self.strides == wanted or self.numel == 0:
            return True
        return all(n == 1 or s == w for n, s, w in zip(self.shape, self.strides, wanted, strict=True))

    def narrow(self, offsets: Sequence[int], sizes: tuple[int, ...]) -> TensorRef:
        """The elements from `offsets` on, `sizes` of them per dim.

        >>> ref = TensorRef(path="a.pt", offset=64, dtype=DType.FLOAT32, shape=(2, 3), strides=(3, 1))
        >>> ref.narrow((1, 1), (1, 2)).offset
        80
        """
        if (*sizes,) == self.shape:
            return self
        return self.strided(sum(map(mul, offsets, self.strides)) if prod(sizes) else 0, sizes, self.strides)

    def strided(self, start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> TensorRef:
        """Elements from `start` on, `sizes` and `strides` in elements per dim. Raises TypeError for encoded bytes."""
        if self.codec:
            raise TypeError(f"expected elements as they are; got {self!r}")
        offset = self.offset + start * self.dtype.itemsize
        return TensorRef(path=self.path, offset=offset, dtype=self.dtype, shape=sizes, strides=strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineTensor:
    """A tensor whose bytes stand in an index: a step count that was a Python number, or one value for all elements.

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
    """Whether `data` is one element, which is the value of all."""

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
        """Whether `data` is all elements, one after another."""
        return not self.repeats


Tensor = TensorRef | InlineTensor


def select_elements(ref: Tensor, first: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Elements of a stored tensor from number `first` on, `sizes` of them per dim in these steps."""
    if isinstance(ref, InlineTensor) and ref.repeats:
        return replace(ref, shape=sizes)
    if isinstance(ref, InlineTensor):
        item = ref.dtype.itemsize
        places = (at * item for at in list_offsets(sizes, strides, first=first))
        return replace(ref, data=b"".join(ref.data[at : at + item] for at in places), shape=sizes)
    if ref.codec:
        skipped = first * ref.dtype.itemsize
        return replace(ref, codec_start=ref.codec_start + skipped, shape=sizes, strides=strides)
    return ref.strided(first, sizes, strides)


def list_offsets(sizes: Sequence[int], strides: Sequence[int], *, first: int) -> list[int]:
    """Places of all elements of some dims, in row-major order.

    >>> starts_of((2, 3), (100, 10), first=5)
    [5, 15, 25, 105, 115, 125]
    """
    starts = [first]
    for count, step in zip(sizes, strides, strict=True):
        starts = [start + number * step for start in starts for number in range(count)]
    return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A stretch of a source file whose checksum the writer recorded (a member of a zip archive)."""

    path: str
    """File."""
    name: str
    """Name of the stretch in the file, for messages."""
    offset: int
    """First byte."""
    nbytes: int
    """Bytes."""
    crc32: int
    """CRC-32 (polynomial of zip) of those bytes."""
