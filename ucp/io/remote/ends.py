"""Both ends of objects, where file formats keep their index, are fetched before the objects are opened.

Indexing a checkpoint takes a few small reads of each file, which would take minutes for a thousand files one after
another. Once the ends of two files were read, those of the next files, in the order of their names, are prefetched:
more and more of them as long as they are used.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from ucp.io.remote.connections import connect
from ucp.io.remote.listing import ListedObject, known_objects_near

BLOCK = 256 << 10
"""Bytes that are fetched for a small read; the last bytes of a file are one block."""

_MAX_BLOCKS = 256
"""Cached blocks: those of 128 files."""
_MAX_FILES = 32
"""Files that are prefetched at once."""
_MAX_UNUSED = 64
"""Unused prefetched blocks after which prefetching stops."""

_NUMBER = re.compile(r"(\d+)")


def end_ranges(nbytes: int) -> tuple[tuple[int, int], ...]:
    """The first and the last block of a file: first byte, one past the last.

    >>> end_ranges(600 << 10), end_ranges(100)
    (((0, 262144), (352256, 614400)), ((0, 100),))
    """
    last = max(0, nbytes - BLOCK)
    return ((0, min(BLOCK, last)), (last, nbytes)) if last else ((0, nbytes),)


@dataclass(slots=True)
class _ObjectRun:
    """Files with the same suffix that are read one after another."""

    urls: Sequence[str] = ()
    """All of them, sorted by name."""
    positions: dict[str, int] = field(default_factory=dict)
    """Position of each."""
    fetched_to: int = 0
    """Position up to which ends were fetched."""
    width: int = 0
    """How many files are prefetched."""
    unused: int = 0
    """Prefetched blocks that were evicted unused."""


@dataclass(slots=True)
class _Block:
    """A block of a file."""

    data: Future[bytes]
    run: _ObjectRun | None
    """Run that it was prefetched for; None once it is used."""


class _Ends:
    """Cached blocks of this process, and those being prefetched."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start empty; in a child of a fork, requests of the parent never complete."""
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, str, int], _Block] = OrderedDict()
        self._runs: dict[tuple[str, str], _ObjectRun] = {}

    def get(self, url: str, entry: ListedObject, low: int, high: int) -> bytes:
        """One block of an object; starts to fetch the blocks that are likely to be read next."""
        with self._lock:
            block = self._start(url, entry, low, high, None)
            block.run = None
            self._prefetch(url)
        return block.data.result()

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._runs.clear()

    def _start(self, url: str, entry: ListedObject, low: int, high: int, run: _ObjectRun | None) -> _Block:
        key = (url, entry.version or str(entry.mtime_ns), low)
        block = self._blocks.get(key)
        if block is None or (block.data.done() and block.data.exception() is not None):
            connection = connect(url)
            block = self._blocks[key] = _Block(connection.submit(connection.fetch, url, entry, low, high), run)
            if len(self._blocks) > _MAX_BLOCKS:
                _, evicted = self._blocks.popitem(last=False)
                if evicted.run is not None:
                    evicted.run.unused += 1
        self._blocks.move_to_end(key)
        return block

    def _prefetch(self, url: str) -> None:
        root, files = known_objects_near(url)
        kind = os.path.splitext(url)[1]
        run = self._runs.get((root, kind))
        if run is None or url not in run.positions:
            urls = sorted((file for file in files if file.endswith(kind)), key=_natural_key)
            run = self._runs[root, kind] = _ObjectRun(urls, {file: position for position, file in enumerate(urls)})
            run.fetched_to = run.positions.get(url, 0) + 1
            return
        position = run.positions[url]
        if run.unused > _MAX_UNUSED or position + run.width // 2 < run.fetched_to:
            return
        run.width = min(_MAX_FILES, max(4, 2 * run.width))
        start = max(run.fetched_to, position + 1)
        for next_url in islice(run.urls, start, start + run.width):
            for low, high in end_ranges(files[next_url].nbytes):
                if low < high:
                    self._start(next_url, files[next_url], low, high, run)
        run.fetched_to = start + run.width


_ends = _Ends()
read_end = _ends.get
clear = _ends.clear
os.register_at_fork(after_in_child=_ends.reset)


def _natural_key(url: str) -> tuple[str | int, ...]:
    """Sort key by which numbers in names are compared as numbers."""
    return tuple(int(part) if number % 2 else part for number, part in enumerate(_NUMBER.split(url)))
