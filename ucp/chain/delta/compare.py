"""Compares the tensors of two checkpoints on several threads, and compresses what differs as it is found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import xxhash
from zlib_ng import zlib_ng

from ucp.chain.delta.document import TensorEntry
from ucp.contract.protocols import Observer
from ucp.core.index import StateIndex
from ucp.core.slices import Locator, block_ranges, resolve
from ucp.core.target import full_slice
from ucp.transfer.gather import Gatherer, ThreadedReader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK = 4 << 20
"""Bytes of a tensor that are compared at once."""

_LEVEL = 1


class Frame(NamedTuple):
    """A compressed patch in a file of a thread."""

    file: IO[bytes]
    offset: int
    nbytes: int
    checksum: str


class TensorPair(NamedTuple):
    """A tensor to compare."""

    label: str
    param: str
    name: str
    a: StateIndex
    b: StateIndex


@dataclass(slots=True)
class Comparison:
    """Compares tensors on several threads, and compresses what differs."""

    encoding: str
    folder: Path
    spools: ExitStack
    observer: Observer
    frames: dict[str, Frame] = field(default_factory=dict)
    """Label to the patch, of tensors that differ."""
    entries: dict[str, dict[str, TensorEntry]] = field(default_factory=lambda: {"a": {}, "b": {}})
    """Side, then label to what the list says of the tensor."""
    base_crcs: dict[str, int] = field(default_factory=dict)
    """Label to the CRC-32 of the bytes of the base."""
    _files: dict[int, IO[bytes]] = field(default_factory=dict)

    def run(self, pairs: Sequence[TensorPair], threads: int) -> None:
        """Compare all tensors. Raises SourceError, CorruptError, OSError."""
        self.observer.begin(title="delta", nbytes=sum(pair.b.nbytes for pair in pairs))
        try:
            with ThreadedReader(threads) as reader:
                reader.run_all(pairs, self._compare)
        finally:
            self.observer.end()

    def _compare(self, pair: TensorPair, gatherer: Gatherer) -> None:
        import numpy as np

        file = self._files.get(id(gatherer))
        if file is None:
            file = self._files[id(gatherer)] = self.spools.enter_context(TemporaryFile(dir=self.folder))  # noqa: SIM115  # closed by the stack
        sums, crc = (xxhash.xxh3_128(), xxhash.xxh3_128()), 0
        start, is_changed = file.seek(0, os.SEEK_END), False
        encoder = (_XorEncoder if self.encoding == "xor" else _OverwriteEncoder)(file, pair.b.nbytes, self.folder)
        with closing(encoder):
            for first, both in _read_blocks(pair, gatherer):
                for digest, data in zip(sums, both, strict=True):
                    digest.update(data)
                crc = zlib_ng.crc32(both[0], crc)
                self.observer.advance(both[1].nbytes)
                before, after = (np.frombuffer(data, dtype=np.uint8) for data in both)
                is_changed = encoder.add(first, before, after) or is_changed
            if is_changed:
                encoder.finish()
            else:
                file.truncate(start)
        self.base_crcs[pair.label] = crc
        for side, digest in zip(("a", "b"), sums, strict=True):
            self.entries[side][pair.label] = TensorEntry(
                name=pair.label, dtype=pair.b.dtype, shape=pair.b.global_shape, checksum=digest.hexdigest()
            )
        if is_changed:
            nbytes = file.seek(0, os.SEEK_END) - start
            self.frames[pair.label] = Frame(file, start, nbytes, sums[1].hexdigest())


def _read_blocks(pair: TensorPair, gatherer: Gatherer) -> Iterator[tuple[int, tuple[memoryview, memoryview]]]:
    """The bytes of both sides, block by block, each with the number of its first byte."""
    item = pair.b.dtype.itemsize
    sides = [(full_slice(pair.param, pair.name, state), Locator(state)) for state in (pair.a, pair.b)]
    for low, high in block_ranges(0, pair.b.numel, BLOCK // item):
        blocks = [
            gatherer.read([(high - low, tensor.dtype, resolve(tensor, locator, low, high))])[0]
            for tensor, locator in sides
        ]
        yield low * item, (blocks[0], blocks[1])


class _XorEncoder:
    """Compresses the exclusive or of a tensor's old and new bytes."""

    def __init__(self, file: IO[bytes], nbytes: int, folder: Path) -> None:
        self._file, self._compressor = file, _compressor(nbytes)

    def add(self, first: int, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> bool:
        """Add the bytes from number `first` on; whether they differ."""
        changes = before ^ after
        self._file.write(self._compressor.compress(changes.data))
        return bool(changes.any())

    def finish(self) -> None:
        """End the frame."""
        self._file.write(self._compressor.flush())

    def close(self) -> None:
        """Nothing."""


class _OverwriteEncoder:
    """Collects positions and new bytes, then compresses their count, the positions and the bytes."""

    def __init__(self, file: IO[bytes], nbytes: int, folder: Path) -> None:
        self._file = file
        self._parts = [TemporaryFile(dir=folder) for _ in range(2)]  # noqa: SIM115  # closed by `close`
        self._count = 0

    def add(self, first: int, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> bool:
        """Add the bytes from number `first` on; whether they differ."""
        import numpy as np

        at = np.flatnonzero(before != after)
        self._parts[0].write((at + first).astype("<u4").tobytes())
        self._parts[1].write(after[at].tobytes())
        self._count += at.size
        return bool(at.size)

    def finish(self) -> None:
        """Write the frame."""
        compressor = _compressor(4 + 5 * self._count)
        self._file.write(compressor.compress(self._count.to_bytes(4, "little")))
        for part in self._parts:
            part.seek(0)
            while data := part.read(BLOCK):
                self._file.write(compressor.compress(data))
        self._file.write(compressor.flush())

    def close(self) -> None:
        """Close the collected parts."""
        for part in self._parts:
            part.close()


def _compressor(nbytes: int) -> Any:
    """Compresses a stream of `nbytes` bytes, a number that the frame states."""
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=nbytes)
