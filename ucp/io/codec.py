"""Compressed blocks: the bytes of the elements are sorted into planes, then compressed with zstd.

Plane `i` holds byte `i` of every element: the high bytes of neighbouring floats (sign, exponent) are alike and shrink
well, where the interleaved bytes would not.

>>> data = bytes(range(8)) * 100
>>> bytes(decode(memoryview(encode(memoryview(data), 4)), codec_name(4))) == data
True
"""

from __future__ import annotations

from ucp.errors import CorruptError

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
