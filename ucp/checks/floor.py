"""Measures this machine: how fast bytes can be read, written and copied in a folder, with and without checksums.

The loop is the simplest that does what a conversion does: read a window, checksum it while it is in the processor's
cache, write it. Dividing the rate of a conversion by that of "copy, with digests" shows how near it is to the best.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Self

import xxhash
from zlib_ng import zlib_ng

from ucp.core.slices import block_ranges
from ucp.errors import DestinationError, SourceError, UsageError
from ucp.io.writing import read_back, write_at

WINDOW = 256 << 10
"""Bytes that are read, checksummed and written at once."""
ROUNDS = 3
"""How often each measurement is repeated; the median counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast one way of moving bytes was."""

    what: str
    """What was done, for example "copy, with digests"."""
    threads: int
    """Number of threads that did it, each with a part of the file."""
    nbytes: int
    """Bytes that were moved."""
    seconds: float
    """Median of the rounds."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes moved in a second."""
        return self.nbytes / self.seconds


def measure_floor(folder: Path, nbytes: int, workers: int) -> Iterator[Rate]:
    """Measure each way of moving bytes, in files of `nbytes` in `folder`, which are deleted afterwards.

    `workers`: threads to measure with, in addition to one thread. Raises UsageError, SourceError, DestinationError.
    """
    if nbytes < WINDOW:
        raise UsageError(f"expected {WINDOW} bytes or more to measure with; got {nbytes}")
    if not folder.is_dir():
        raise SourceError(f"expected a folder to measure in; {folder} is not a folder")
    free = shutil.disk_usage(folder).free
    if free < 2 * nbytes:
        raise DestinationError(f"expected {2 * nbytes:,} bytes free in {folder}; there are {free:,}: lower --size")
    with TemporaryDirectory(dir=folder, prefix=".ucp-bench-") as work, _Files(Path(work), nbytes) as files:
        yield files.measure("write", 1, files.write)
        yield files.measure("write and fsync", 1, files.write_through)
        for threads in sorted({1, workers}):
            yield files.measure("read", threads, files.read)
            yield files.measure("copy", threads, files.copy)
            yield files.measure("copy, with digests", threads, files.copy_summed)


def measure_writes(folder: Path, nbytes: int) -> Rate:
    """How fast one thread writes a file of `nbytes` in `folder`, until it is on the disk; the file is deleted then."""
    return next(rate for rate in measure_floor(folder, nbytes, 1) if rate.what == "write and fsync")


class _Files:
    """Two files of the same length, one to read and one to write."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._nbytes = nbytes
        self._src = os.open(folder / "src", os.O_RDWR | os.O_CREAT)
        self._dst = os.open(folder / "dst", os.O_RDWR | os.O_CREAT)
        self._noise = memoryview(os.urandom(WINDOW))
        self.write(0, nbytes)
        self._src, self._dst = self._dst, self._src

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._src)
        os.close(self._dst)

    def measure(self, what: str, threads: int, operation: Callable[[int, int], None]) -> Rate:
        """The rate of `operation`, called by each thread for its part of the file."""
        share = -(-self._nbytes // threads)
        ranges = list(block_ranges(0, self._nbytes, share))
        spent = []
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(ROUNDS):
                start = time.perf_counter()
                list(pool.map(operation, *zip(*ranges, strict=True)))
                spent.append(time.perf_counter() - start)
        return Rate(what=what, threads=threads, nbytes=self._nbytes, seconds=median(spent))

    def write(self, start: int, stop: int) -> None:
        """Write random bytes, which no file system can compress."""
        for low, high in block_ranges(start, stop, WINDOW):
            write_at(self._dst, self._noise[: high - low], low)

    def write_through(self, start: int, stop: int) -> None:
        """Write, and wait until the bytes are on the disk."""
        self.write(start, stop)
        os.fsync(self._dst)

    def read(self, start: int, stop: int) -> None:
        """Read; from the page cache if the file is in it."""
        for _ in self._windows(start, stop):
            pass

    def copy(self, start: int, stop: int) -> None:
        """Read and write."""
        for low, view in self._windows(start, stop):
            write_at(self._dst, view, low)

    def copy_summed(self, start: int, stop: int) -> None:
        """Read, checksum as a conversion does (CRC-32 and xxh3), and write."""
        crc, digest = 0, xxhash.xxh3_64()
        for low, view in self._windows(start, stop):
            crc = zlib_ng.crc32(view, crc)
            digest.update(view)
            write_at(self._dst, view, low)

    def _windows(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        buffer = memoryview(bytearray(WINDOW))
        for low, high in block_ranges(start, stop, WINDOW):
            view = buffer[: high - low]
            read_back(self._src, view, low)
            yield low, view
