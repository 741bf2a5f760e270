"""Compressed blocks: the bytes of the elements are sorted into planes, then compressed with zstd.

Plane `i` holds byte `i` of every element: the high bytes of neighbouring floats (sign, exponent) are alike and shrink
well, where the interleaved bytes would not.

>>> data = bytes(range(8)) * 100
>>> bytes(decode(memoryview(encode(memoryview(data), 4)), codec_name(4))) == data
True
"""

from __future__ import annotations

from collections.abc import Callable

from ucp.core.tensor import TensorRef
from ucp.errors import CorruptError

__all__ = ["Blocks", "codec_name", "decode", "encode"]

_PREFIX = "zstd-planes"
_LEVEL = 3
_MOST_NBYTES = 64 << 20
"""Bytes of a decoded block, at most: a damaged length must not ask for all memory."""
_WIDTHS = ("1", "2", "4", "8", "16")


def codec_name(itemsize: int) -> str:
    """Name of the codec for elements of `itemsize` bytes."""
    return f"{_PREFIX}{itemsize}"


def encode(data: memoryview, itemsize: int) -> bytes:
    """`data` in planes, compressed; at least one element."""
    import numpy as np
    import zstandard

    planes = np.frombuffer(data, dtype=np.uint8).reshape(-1, itemsize).T
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(planes.tobytes())


def decode(data: memoryview, codec: str) -> memoryview:
    """What `encode` was given. Raises CorruptError when `data` is not that."""
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


class Blocks:
    """The block decoded last: it is several pieces where it does not end with a row."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[tuple[str, int], memoryview] | None = None

    def get(self, ref: TensorRef, nbytes: int, read: Callable[[str, int, int], memoryview]) -> memoryview:
        """The block that `ref` lies in, of at least `nbytes` bytes; `read`: bytes of a file at an offset.

        Raises CorruptError when it does not decode, or is shorter.
        """
        key = (ref.path, ref.offset)
        if self._last is None or self._last[0] != key:
            self._last = None  # one block at a time in memory
            data = read(*key, ref.codec_nbytes)
            try:
                self._last = key, decode(data, ref.codec)
            except CorruptError as error:
                raise CorruptError(f"{ref.path}, bytes {ref.offset}:{ref.offset + data.nbytes}: {error}") from error
        raw = self._last[1]
        if nbytes > raw.nbytes:
            raise CorruptError(
                f"{ref.path}: expected a compressed block of {nbytes} bytes or more at {ref.offset}; got {raw.nbytes}"
            )
        return raw
