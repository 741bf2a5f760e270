"""Compares the tensors of two checkpoints on several threads, and compresses what differs as it is found."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

import xxhash
from zlib_ng import zlib_ng

from ucp.chain.delta.document import TensorEntry
from ucp.contract.protocols import Observer
from ucp.core.index import StateIndex
from ucp.core.slices import Locator, block_ranges, resolve
from ucp.core.target import full_slice
from ucp.transfer.compare import run_stage
from ucp.transfer.gather import Gatherer

BLOCK = 4 << 20
"""Bytes of a tensor that are compared at once."""

_LEVEL = 1
_Block = tuple[int, memoryview, memoryview]
"""Number of a block's first byte, and the bytes of both sides."""


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
        nbytes = sum(pair.b.nbytes for pair in pairs)
        run_stage(pairs, self._compare, threads, self.observer, title="delta", nbytes=nbytes)

    def _compare(self, pair: TensorPair, gatherer: Gatherer) -> None:
        file = self._files.get(id(gatherer))
        if file is None:
            file = self._files[id(gatherer)] = self.spools.enter_context(TemporaryFile(dir=self.folder))  # noqa: SIM115  # closed by the stack
        sums, crc, item = (xxhash.xxh3_128(), xxhash.xxh3_128()), 0, pair.b.dtype.itemsize
        sides = [(full_slice(pair.param, pair.name, state), Locator(state)) for state in (pair.a, pair.b)]

        def read_blocks() -> Iterator[_Block]:
            nonlocal crc
            for low, high in block_ranges(0, pair.b.numel, BLOCK // item):
                a, b = (
                    gatherer.read([(high - low, side.dtype, resolve(side, at, low, high))])[0] for side, at in sides
                )
                for digest, data in zip(sums, (a, b), strict=True):
                    digest.update(data)
                crc = zlib_ng.crc32(a, crc)
                self.observer.advance(b.nbytes)
                yield low * item, a, b

        start = file.seek(0, os.SEEK_END)
        if self.encoding == "xor":
            is_changed = _write_xor(file, read_blocks(), pair.b.nbytes)
        else:
            is_changed = _write_overwrite(file, read_blocks(), self.folder)
        self.base_crcs[pair.label] = crc
        for side, digest in zip(("a", "b"), sums, strict=True):
            self.entries[side][pair.label] = TensorEntry(
                name=pair.label, dtype=pair.b.dtype, shape=pair.b.global_shape, checksum=digest.hexdigest()
            )
        if is_changed:
            nbytes = file.seek(0, os.SEEK_END) - start
            self.frames[pair.label] = Frame(file, start, nbytes, sums[1].hexdigest())
        else:
            file.truncate(start)


def _write_xor(file: IO[bytes], blocks: Iterable[_Block], nbytes: int) -> bool:
    """Write the exclusive or of a tensor's old and new bytes, compressed; whether any differ."""
    import numpy as np

    compressor, is_changed = _compressor(nbytes), False
    for _, before, after in blocks:
        changes = np.frombuffer(before, dtype=np.uint8) ^ np.frombuffer(after, dtype=np.uint8)
        file.write(compressor.compress(changes.data))
        is_changed = is_changed or bool(changes.any())
    file.write(compressor.flush())
    return is_changed


def _write_overwrite(file: IO[bytes], blocks: Iterable[_Block], folder: Path) -> bool:
    """Write the number of bytes that differ, their positions and the new bytes, compressed; whether there are any."""
    import numpy as np

    with TemporaryFile(dir=folder) as positions, TemporaryFile(dir=folder) as values:
        for first, before, after in blocks:
            old, new = (np.frombuffer(data, dtype=np.uint8) for data in (before, after))
            changed = np.flatnonzero(old != new)
            positions.write((changed + first).astype("<u4").tobytes())
            values.write(new[changed].tobytes())
        count = values.tell()
        compressor = _compressor(4 + 5 * count)
        file.write(compressor.compress(count.to_bytes(4, "little")))
        for part in (positions, values):
            part.seek(0)
            while data := part.read(BLOCK):
                file.write(compressor.compress(data))
        file.write(compressor.flush())
    return bool(count)


def _compressor(nbytes: int) -> Any:
    """Compresses a stream of `nbytes` bytes, a number that the frame states."""
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=nbytes)
