"""Objects of a store, read as the files of a disk are: at any place, by any thread.

A read of some size is cut into requests of a few MiB, made side by side. Indexes stand at the ends of files, and are
read in small steps: a small read takes the block that it lies in, which is kept. What a worker reads next is known to
it beforehand, and is announced (`ucp.io.remote.ahead`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import lru_cache

from ucp.errors import MalformedError, MissingFileError
from ucp.io.files import SourceFile, join_ranges, truncated
from ucp.io.remote.ahead import GAP, REQUEST, Ahead, Extent
from ucp.io.remote.ends import BLOCK, end_of
from ucp.io.remote.failures import changed
from ucp.io.remote.link import link_of
from ucp.io.remote.listing import Entry, entry_of

_SMALL = 64 << 10
"""Bytes of a small read."""

_KEPT = 2
"""Blocks of a file that are kept: those at its ends."""


class RemoteFile(SourceFile):
    """Bytes of an object, or of several read as one."""

    gap = GAP

    def __init__(self, path: str, parts: Sequence[str], *, version: str = "", ahead: Ahead | None = None) -> None:
        """`version`: what it is expected to be, where that is known. Raises MissingFileError, ChangedError."""
        self.path = path
        self.nbytes = 0
        self._starts: list[int] = []
        self._parts: list[tuple[str, Entry]] = []
        self._block = lru_cache(_KEPT)(self._read_block)
        self._ahead = ahead
        self._is_alone = ahead is None
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
            raise changed(path)

    @property
    def version(self) -> str:
        """What changes whenever its bytes do; empty where the store has no such thing."""
        return ",".join(entry.version for _, entry in self._parts)

    def read_into(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views`, in order, with the bytes from `offset` on. Raises MalformedError past the end of the file."""
        own = [view.cast("B") for view in views if view.nbytes]
        total = sum(view.nbytes for view in own)
        if offset < 0 or offset + total > self.nbytes:
            raise truncated(self.path, self.nbytes, offset, total)
        if len(own) == 1:
            self._fill(own[0], offset)
            return
        data = memoryview(bytearray(total))
        self._fill(data, offset)
        at = 0
        for view in own:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes

    def read_runs(self, buffer: memoryview, starts: Sequence[int]) -> None:
        """Fill `buffer` with equally long runs of the file, one for each of `starts`. Raises MalformedError."""
        nbytes = len(buffer) // len(starts)
        runs = ((start, start + nbytes) for start in starts)
        at = 0
        for low, high, count in join_ranges(runs, gap=self.gap, most=2 * REQUEST):
            if low < 0 or high > self.nbytes:
                raise truncated(self.path, self.nbytes, low, high - low)
            data = memoryview(bytearray(high - low))
            self._fill(data, low, wanted=count * nbytes)
            for start in starts[at : at + count]:
                buffer[at * nbytes : (at + 1) * nbytes] = data[start - low : start - low + nbytes]
                at += 1

    def expect(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Have stretches (first byte, one past the last) come that will be read in this order."""
        self._ahead = Ahead(lambda _: self)
        self._ahead.expect((Extent(self.path, low, high, high - low) for low, high in stretches), batch=0)

    def close(self) -> None:
        """Let go of what is kept."""
        if self._is_alone and self._ahead is not None:
            self._ahead.drop(batch=0)
        self._block.cache_clear()

    def start(self, start: int, stop: int) -> list[tuple[int, int, Future[bytes]]]:
        """Begin to read bytes: requests under way (first byte, one past the last, what comes)."""
        under_way = []
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            url, entry = self._parts[number]
            first = self._starts[number]
            end = min(stop, start + REQUEST, first + entry.nbytes)
            link = link_of(url)
            under_way.append((start, end, link.submit(link.fetch, url, entry, start - first, end - first)))
            start = end
        return under_way

    def _fill(self, view: memoryview, offset: int, wanted: int | None = None) -> None:
        """Fill a buffer; `wanted`: how many of its bytes will be used."""
        rest: Iterable[tuple[int, int]] = ((offset, offset + view.nbytes),)
        if self._ahead is not None:
            rest = self._ahead.take(self, view, offset, wanted=view.nbytes if wanted is None else wanted)
        last = max(0, self.nbytes - BLOCK)
        for start, stop in rest:
            if stop - start > _SMALL:
                for low, high, data in self.start(start, stop):
                    view[low - offset : high - offset] = data.result()
                continue
            at = start
            while at < stop:  # in blocks counted from the start, or in the last bytes of the file
                low = last if at >= last else at // BLOCK * BLOCK
                high = self.nbytes if at >= last else min(low + BLOCK, last)
                end = min(stop, high)
                view[at - offset : end - offset] = self._block(low, high)[at - low : end - low]
                at = end

    def _read_block(self, low: int, high: int) -> bytes:
        if len(self._parts) == 1:
            return end_of(*self._parts[0], low, high)
        return b"".join(data.result() for _, _, data in self.start(low, high))
