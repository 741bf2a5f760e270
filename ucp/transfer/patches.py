"""Patches: the bytes of a tensor that changed, each patch a zstd frame that is decoded as a stream.

| codec | in the frame |
|---|---|
| `xor-zstd` | as many bytes as the tensor has, to be combined with its bytes by exclusive or |
| `overwrite-zstd` | u32 count; `count` u32 positions of bytes, increasing; `count` bytes (all little-endian) |

These are the entries of the delta checkpoints of slime and SGLang. A stream only goes on: whoever applies a patch to
the blocks of a tensor in order decodes it once, whatever its size, in a bounded amount of memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from ucp.core.slices import Piece, block_ranges, in_file_order
from ucp.core.tensor import DType, TensorRef
from ucp.errors import CorruptError
from ucp.io.elements import assign, strided, viewed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from zstandard import ZstdDecompressor

    from ucp.transfer.gather import Gatherer

XOR, OVERWRITE = "xor-zstd", "overwrite-zstd"
"""Codecs of patches."""

WINDOW = 1 << 20
"""The most bytes of a tensor that a strided patch is applied to at once."""

OPEN_PATCHES = 128
"""Patches that a thread keeps open, to go on with the next block of a tensor; each takes up to two megabytes."""

_CHUNK = 128 << 10
"""Bytes that are decoded at once."""

_MOST_READ = 512 << 10
"""Bytes of a frame that are read at once."""

_POSITIONS = _CHUNK
"""Positions that are decoded at once. A patch that has no more is decoded in one go."""

_MOST_WINDOW = 8 << 20
"""The largest window of a frame, bytes: what every decoder of zstd supports, and levels up to 19 need."""

_idle: list[ZstdDecompressor] = []
"""Decompressors that are not in use: making one takes longer than decoding a small patch."""

ReadRange = Callable[[str, int, int], bytearray]
"""Reads (path, offset, bytes) of a file."""


def is_patch(piece: Piece) -> bool:
    """Whether a piece changes bytes of those before it."""
    return isinstance(piece.ref, TensorRef) and piece.ref.codec in (XOR, OVERWRITE)


@dataclass(slots=True)
class Patcher:
    """Applies patches, and keeps them open for the next block of the same tensor."""

    _open: OrderedDict[tuple[str, int], Patch] = field(default_factory=OrderedDict)
    """Open patches by (file, offset), the least recently used first."""
    _gatherer: Gatherer | None = None
    """Reads for the patches; another one for each task."""

    def fill(self, gatherer: Gatherer, buffer: memoryview, dtype: DType, pieces: Sequence[Piece]) -> None:
        """Read the pieces of a base, unless they were copied already, apply the patches, then cast."""
        self._gatherer = gatherer
        patches = sorted(filter(is_patch, pieces), key=lambda piece: piece.term)
        stored = patches[0].ref.dtype
        if stored is not dtype:
            whole = memoryview(bytearray(buffer.nbytes // dtype.itemsize * stored.itemsize))
            gatherer.fill(whole, stored, pieces)
            assign(viewed(buffer, dtype), viewed(whole, stored))
            return
        for piece in filterfalse(is_patch, pieces):
            for part, values in gatherer.read_values(piece):
                assign(_view_target(buffer, part), values)
        for patch in map(in_file_order, patches):
            target = _view_target(buffer, patch)
            if target.flags.c_contiguous and patch.extent == target.nbytes:
                self._apply(patch, buffer[patch.dst_offset * target.itemsize :][: patch.extent])
                continue
            for part in _split_extent(patch, WINDOW):
                self._apply_part(buffer, part)

    def _apply_part(self, buffer: memoryview, part: Piece) -> None:
        """Apply a part of a patch whose elements are not side by side, in a copy with the gaps between them."""
        target = _view_target(buffer, part)
        window = memoryview(bytearray(part.extent))
        values = strided(window, part.ref.dtype, offset=0, sizes=part.sizes, strides=part.src_strides)
        values[...] = target
        self._apply(part, window)
        target[...] = values

    def _apply(self, piece: Piece, data: memoryview) -> None:
        """Apply a patch to `data`, which are the bytes of the tensor from the first element of a piece on."""
        ref = cast("TensorRef", piece.ref)  # that of a patch
        first, key = ref.codec_start + piece.src_offset, (ref.path, ref.offset)
        patch = self._open.pop(key, None)
        try:
            if patch is None or patch.position > first:
                patch = (_XorPatch if ref.codec == XOR else _OverwritePatch)(ref, self._read_range)
            patch.apply(first, data)
        except CorruptError as error:
            where = f"{ref.path}, bytes {ref.offset}:{ref.offset + ref.codec_nbytes}"
            raise CorruptError(f"{where}: {error}. Copy the file again") from error
        if patch.position < ref.patched_nbytes:
            self._open[key] = patch
            if len(self._open) > OPEN_PATCHES:
                self._open.popitem(last=False)

    def _read_range(self, path: str, offset: int, nbytes: int) -> bytearray:
        assert self._gatherer is not None
        data = bytearray(nbytes)
        ref = TensorRef(path=path, offset=offset, dtype=DType.UINT8, shape=(nbytes,), strides=(1,))
        piece = Piece(ref=ref, sizes=(nbytes,), src_offset=0, src_strides=(1,), dst_offset=0, dst_strides=(1,))
        self._gatherer.fill(memoryview(data), DType.UINT8, [piece])
        return data


def _view_target(buffer: memoryview, piece: Piece) -> NDArray[Any]:
    """The elements of a buffer that a piece is copied to, or is a patch of."""
    item = piece.ref.dtype.itemsize
    strides = tuple(step * item for step in piece.dst_strides)
    return strided(buffer, piece.ref.dtype, offset=piece.dst_offset * item, sizes=piece.sizes, strides=strides)


def _split_extent(piece: Piece, limit: int) -> Iterator[Piece]:
    """Parts of a piece in file order, each from bytes of the source that are at most `limit` apart."""
    if piece.extent <= limit or piece.sizes == (1,):
        yield piece
        return
    count, step = piece.sizes[0], piece.src_strides[0]
    if count == 1:
        sizes, src, dst = piece.sizes[1:], piece.src_strides[1:], piece.dst_strides[1:]
        yield from _split_extent(replace(piece, sizes=sizes, src_strides=src, dst_strides=dst), limit)
        return
    rows = max(1, (limit - (piece.extent - (count - 1) * step)) // step + 1)
    for low, high in block_ranges(0, count, rows):
        part = replace(
            piece,
            sizes=(high - low, *piece.sizes[1:]),
            src_offset=piece.src_offset + low * step,
            dst_offset=piece.dst_offset + low * piece.dst_strides[0],
        )
        yield from _split_extent(part, limit)


class Patch(Protocol):
    """A patch of one tensor, applied from its first byte on."""

    position: int
    """The first byte of the tensor that it can still be applied to."""

    def apply(self, first: int, data: memoryview) -> None:
        """Apply it in place to `data`, the bytes of the tensor from number `first` on. Raises CorruptError."""


class _Frame:
    """The decoded bytes of a zstd frame, in order."""

    def __init__(self, ref: TensorRef, read: ReadRange) -> None:
        import zstandard

        self._path, self._read_range = ref.path, read
        self._at, self._stop = ref.offset, ref.offset + ref.codec_nbytes
        self._error = zstandard.ZstdError
        try:
            self._decompressor = _idle.pop()
        except IndexError:
            self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        source = cast("IO[bytes]", self)  # it calls `read` alone
        self._stream = self._decompressor.stream_reader(source, read_size=_MOST_READ, read_across_frames=False)
        self.position = 0

    def read(self, nbytes: int) -> bytes | bytearray:
        """The next encoded bytes, for the decoder."""
        nbytes = min(nbytes, self._stop - self._at)
        self._at += nbytes
        return self._read_range(self._path, self._at - nbytes, nbytes) if nbytes else b""

    def fill(self, data: memoryview) -> None:
        """Fill `data` with the next decoded bytes. Raises CorruptError."""
        got = 0
        while got < data.nbytes:
            count = self._decode(data[got:])
            if not count:
                raise CorruptError(
                    f"expected a patch of {self.position + data.nbytes - got:,} bytes or more; it ends at "
                    f"{self.position:,}"
                )
            got += count

    def skip_to(self, position: int) -> None:
        """Decode up to `position`. Raises CorruptError."""
        while self.position < position:
            self.fill(memoryview(bytearray(min(_CHUNK, position - self.position))))

    def check_end(self) -> None:
        """Raise CorruptError unless all bytes were decoded. Nothing may be decoded after that."""
        if self._decode(memoryview(bytearray(1))):
            raise CorruptError(f"expected a patch of {self.position - 1:,} bytes; got a longer one")
        _idle.append(self._decompressor)

    def _decode(self, data: memoryview) -> int:
        try:
            count: int = self._stream.readinto(data)
        except self._error as error:
            raise CorruptError(f"the patch does not decode: {error}") from error
        self.position += count
        return count


class _XorPatch(Patch):
    """A patch of codec `xor-zstd`."""

    def __init__(self, ref: TensorRef, read: ReadRange) -> None:
        self._frame = _Frame(ref, read)
        self._nbytes = ref.patched_nbytes
        self.position = 0

    def apply(self, first: int, data: memoryview) -> None:
        """Apply it to the bytes from number `first` on. Raises CorruptError."""
        import numpy as np

        self._frame.skip_to(first)
        target = np.frombuffer(data, dtype=np.uint8)
        for low in range(0, target.size, _CHUNK):
            part = target[low : low + _CHUNK]
            changes = np.empty_like(part)
            self._frame.fill(changes.data)
            part ^= changes
        self.position = first + data.nbytes
        if self.position == self._nbytes:
            self._frame.check_end()


class _OverwritePatch(Patch):
    """A patch of codec `overwrite-zstd`. If it is large, one stream is at its positions, another at its bytes."""

    def __init__(self, ref: TensorRef, read: ReadRange) -> None:
        import numpy as np

        self._nbytes = ref.patched_nbytes
        self._positions = self._bytes = _Frame(ref, read)
        self._left = int(self._decode(self._positions, "<u4", 1)[0])
        if self._left > _POSITIONS:
            self._bytes = _Frame(ref, read)
            self._bytes.skip_to(4 + 4 * self._left)
        self._pending: tuple[NDArray[np.intp], NDArray[np.uint8]] = (np.empty(0, np.intp), np.empty(0, np.uint8))
        self._last = -1
        self.position = 0
        if not self._left:
            self._bytes.check_end()

    def apply(self, first: int, data: memoryview) -> None:
        """Apply it to the bytes from number `first` on. Raises CorruptError."""
        import numpy as np

        target = np.frombuffer(data, dtype=np.uint8)
        stop = first + target.size
        while self._pending[0].size or self._left:
            positions, values = self._pending if self._pending[0].size else self._next()
            low, high = (int(position) for position in np.searchsorted(positions, (first, stop)))
            applied = positions[low:high]
            applied -= first
            target[applied] = values[low:high]
            self._pending = positions[high:], values[high:]
            if self._pending[0].size:
                break
        self.position = stop

    def _next(self) -> tuple[NDArray[np.intp], NDArray[np.uint8]]:
        """The next positions, and the bytes for them."""
        import numpy as np

        count = min(self._left, _POSITIONS)
        positions = self._decode(self._positions, "<u4", count)
        values: NDArray[np.uint8] = self._decode(self._bytes, "u1", count)
        self._left -= count
        if positions[0] <= self._last or (positions[1:] <= positions[:-1]).any():
            raise CorruptError("expected positions of bytes that increase in a patch")
        self._last = int(positions[-1])
        if self._last >= self._nbytes:
            raise CorruptError(
                f"expected positions below {self._nbytes:,}, as the tensor has so many bytes; got {self._last:,}"
            )
        if not self._left:
            self._bytes.check_end()
        return positions.astype(np.intp), values

    @staticmethod
    def _decode(frame: _Frame, dtype: str, count: int) -> NDArray[Any]:
        import numpy as np

        values = np.empty(count, dtype=dtype)
        frame.fill(values.view(np.uint8).data)
        return values
