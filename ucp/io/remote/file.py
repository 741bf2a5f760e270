"""Objects of a store, read like local files: at any offset, by any thread.

A large read is split into concurrent requests of a few MiB. A small read fetches the block around it, which is cached.
Workers announce what they will read (`ucp.io.remote.prefetch`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import lru_cache

from ucp.errors import MalformedError, MissingFileError
from ucp.io.files import SourceFile, join_ranges, truncated_error
from ucp.io.remote.connections import connect
from ucp.io.remote.ends import BLOCK, read_end
from ucp.io.remote.failures import changed_error
from ucp.io.remote.listing import ListedObject, entry_of
from ucp.io.remote.prefetch import GAP, REQUEST, Extent, Prefetcher

_SMALL = 64 << 10
"""Bytes of a small read."""

_MAX_BLOCKS = 2
"""Cached blocks of a file: those at its ends."""


class RemoteFile(SourceFile):
    """Bytes of an object, or of several read as one."""

    gap = GAP

    def __init__(
        self, path: str, parts: Sequence[str], *, version: str = "", prefetcher: Prefetcher | None = None
    ) -> None:
        """`version`: the expected one, if known. Raises MissingFileError, ChangedError."""
        self.path = path
        self.nbytes = 0
        self._starts: list[int] = []
        self._parts: list[tuple[str, ListedObject]] = []
        self._block = lru_cache(_MAX_BLOCKS)(self._read_block)
        self._prefetcher = prefetcher
        self._owns_prefetcher = prefetcher is None
        for part in parts:
            entry = entry_of(part)
            if entry is None:
                raise MissingFileError(f"expected an object at {part}; nothing is there. Check the URL, or copy it")
            if entry.is_folder:
                raise MalformedError(f"expected an object; got a folder at {part}")
            self._starts.append(self.nbytes)
            self._parts.append((part, entry))
            self.nbytes += entry.nbytes
        if version and version != self.version:
            raise changed_error(path)

    @property
    def version(self) -> str:
        """ETag or generation, which changes with the bytes; empty if the store has none."""
        return ",".join(entry.version for _, entry in self._parts)

    def read_into(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views`, in order, with the bytes from `offset` on. Raises MalformedError past the end of the file."""
        buffers = [view.cast("B") for view in views if view.nbytes]
        total = sum(view.nbytes for view in buffers)
        if offset < 0 or offset + total > self.nbytes:
            raise truncated_error(self.path, self.nbytes, offset, total)
        if len(buffers) == 1:
            self._fill(buffers[0], offset)
            return
        data = memoryview(bytearray(total))
        self._fill(data, offset)
        position = 0
        for view in buffers:
            view[:] = data[position : position + view.nbytes]
            position += view.nbytes

    def read_runs(self, buffer: memoryview, starts: Sequence[int]) -> None:
        """Fill `buffer` with equally long runs of the file, one for each of `starts`. Raises MalformedError."""
        nbytes = len(buffer) // len(starts)
        runs = ((start, start + nbytes) for start in starts)
        number = 0
        for low, high, count in join_ranges(runs, gap=self.gap, limit=2 * REQUEST):
            if low < 0 or high > self.nbytes:
                raise truncated_error(self.path, self.nbytes, low, high - low)
            data = memoryview(bytearray(high - low))
            self._fill(data, low, used_nbytes=count * nbytes)
            for start in starts[number : number + count]:
                buffer[number * nbytes : (number + 1) * nbytes] = data[start - low : start - low + nbytes]
                number += 1

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Start to fetch ranges that will be read in this order."""
        self._prefetcher = Prefetcher(lambda _: self)
        self._prefetcher.expect((Extent(self.path, low, high, high - low) for low, high in ranges), batch=0)

    def close(self) -> None:
        """Cancel requests and drop cached blocks."""
        if self._owns_prefetcher and self._prefetcher is not None:
            self._prefetcher.cancel(batch=0)
        self._block.cache_clear()

    def start(self, start: int, stop: int) -> list[tuple[int, int, Future[bytes]]]:
        """Start requests for a range: first byte, one past the last, future bytes."""
        requests = []
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            url, entry = self._parts[number]
            first = self._starts[number]
            end = min(stop, start + REQUEST, first + entry.nbytes)
            connection = connect(url)
            requests.append((start, end, connection.submit(connection.fetch, url, entry, start - first, end - first)))
            start = end
        return requests

    def _fill(self, view: memoryview, offset: int, used_nbytes: int | None = None) -> None:
        """Fill a buffer. `used_nbytes`: how many of its bytes will be used."""
        ranges: Iterable[tuple[int, int]] = ((offset, offset + view.nbytes),)
        if self._prefetcher is not None:
            ranges = self._prefetcher.take(
                self, view, offset, used_nbytes=view.nbytes if used_nbytes is None else used_nbytes
            )
        last = max(0, self.nbytes - BLOCK)
        for start, stop in ranges:
            if stop - start > _SMALL:
                for low, high, data in self.start(start, stop):
                    view[low - offset : high - offset] = data.result()
                continue
            position = start
            while position < stop:  # in blocks from the start, or the one at the end
                low = last if position >= last else position // BLOCK * BLOCK
                high = self.nbytes if position >= last else min(low + BLOCK, last)
                end = min(stop, high)
                view[position - offset : end - offset] = self._block(low, high)[position - low : end - low]
                position = end

    def _read_block(self, low: int, high: int) -> bytes:
        if len(self._parts) == 1:
            return read_end(*self._parts[0], low, high)
        return b"".join(data.result() for _, _, data in self.start(low, high))
