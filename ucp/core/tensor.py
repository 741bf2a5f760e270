"""A tensor is a reference: where its elements lie, never the elements themselves.

>>> ref = TensorRef(path="a.pt", offset=64, dtype=DType.FLOAT32, shape=(2, 3), strides=(3, 1))
>>> ref.nbytes, ref.is_contiguous
(24, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import mul

from ucp.core.dtypes import DType


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


def picked(ref: Tensor, first: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Elements of a stored tensor from number `first` on, `sizes` of them per dim in these steps."""
    if isinstance(ref, InlineTensor) and ref.repeats:
        return replace(ref, shape=sizes)
    if isinstance(ref, InlineTensor):
        item = ref.dtype.itemsize
        places = (at * item for at in starts_of(sizes, strides, first=first))
        return replace(ref, data=b"".join(ref.data[at : at + item] for at in places), shape=sizes)
    if ref.codec:
        skipped = first * ref.dtype.itemsize
        return replace(ref, codec_start=ref.codec_start + skipped, shape=sizes, strides=strides)
    return ref.strided(first, sizes, strides)


def starts_of(sizes: Sequence[int], strides: Sequence[int], *, first: int) -> list[int]:
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
