"""Bytes of objects are requested before they are needed: a conversion knows what it will read, and in which order.

Announced ranges are joined into requests of a few MiB. Requests that are running, or whose bytes wait to be used, take
at most `BUDGET` bytes per thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import attrgetter
from typing import NamedTuple, Protocol

from ucp.io.files import join_ranges

BUDGET = 32 << 20
"""Bytes per thread that are requested and not used yet."""

REQUEST = 4 << 20
"""Bytes of one request, at most."""
GAP = 128 << 10
"""Unneeded bytes between two ranges up to which one request reads both."""

_SKIPPED_SHARE = 50
"""A request that was read past is finished when less than this share of its bytes (1/50) is unused."""


class Extent(NamedTuple):
    """Bytes of a file that will be read."""

    path: str
    """File."""
    start: int
    """First byte."""
    stop: int
    """One past the last."""
    nbytes: int
    """How many of them will be used: fewer if a fragment is strided."""


class Readable(Protocol):
    """A file that can be read asynchronously."""

    path: str

    def start(self, start: int, stop: int) -> list[tuple[int, int, Future[bytes]]]:
        """Start requests: first byte, one past the last, future bytes."""


@dataclass(slots=True, eq=False)
class _Request:
    """A range of a file that is read at once."""

    path: str
    start: int
    stop: int
    unused_nbytes: int
    """Bytes that are still to be used."""
    batch: int
    """Number of the announcement."""
    parts: list[tuple[int, int, Future[bytes]]] = field(default_factory=list)
    """Running requests."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Prefetcher:
    """The reads that one thread announced."""

    def __init__(self, open_file: Callable[[str], Readable]) -> None:
        """`open_file` returns the file at a path."""
        self._open_file = open_file
        self._queue: deque[_Request] = deque()
        self._files: dict[str, list[_Request]] = {}
        self._nbytes = 0

    def expect(self, extents: Iterable[Extent], *, batch: int) -> None:
        """Announce reads, roughly in this order, as announcement number `batch`."""
        for group in _split_batches(extents):
            for request in _plan_requests(group, batch):
                self._files.setdefault(request.path, []).append(request)
                self._queue.append(request)
        for requests in self._files.values():
            requests.sort(key=lambda request: request.start)
        self._start_queued()

    def cancel(self, *, batch: int | None) -> None:
        """Cancel the reads of announcements up to number `batch`; None: of all."""
        if batch is None:
            self._queue.clear()
        announced = [request for requests in self._files.values() for request in requests]
        for request in announced:
            if batch is None or request.batch <= batch:
                self._finish(request)
        self._start_queued()

    def take(self, file: Readable, view: memoryview, offset: int, *, used_nbytes: int) -> Iterator[tuple[int, int]]:
        """Fill a buffer with what was announced; yields the ranges of the file that were not.

        `used_nbytes`: how many of the bytes will be used.
        """
        position, stop = offset, offset + view.nbytes
        share = used_nbytes / max(1, view.nbytes)
        while position < stop:
            request, following = self._find_request(file.path, position)
            if request is None:
                end = min(stop, following)
                yield position, end
            else:
                end = min(stop, request.stop)
                self._copy(file, request, view[position - offset : end - offset], position)
                request.unused_nbytes -= round((end - position) * share)
                self._finish_used(request, end)
            position = end

    def _find_request(self, path: str, offset: int) -> tuple[_Request | None, int]:
        """The request that reads a byte, or where the next request begins."""
        requests = self._files.get(path, ())
        number = bisect_right(requests, offset, key=lambda request: request.start) - 1
        for request in reversed(requests[max(0, number - 1) : number + 1]):
            if request.start <= offset < request.stop:
                return request, request.stop
        following = requests[number + 1].start if number + 1 < len(requests) else 1 << 63
        return None, following

    def _copy(self, file: Readable, request: _Request, view: memoryview, offset: int) -> None:
        if not request.parts:
            self._start(request, file)
        stop = offset + view.nbytes
        for low, high, data in request.parts:
            start, end = max(low, offset), min(high, stop)
            if start < end:
                view[start - offset : end - offset] = memoryview(data.result())[start - low : end - low]

    def _finish_used(self, request: _Request, read_to: int) -> None:
        """Finish requests that are used up, and earlier ones of which strided reads left a little."""
        requests = self._files[request.path]
        position = requests.index(request)
        skipped = (
            other
            for other in requests[:position]
            if other.parts and other.unused_nbytes * _SKIPPED_SHARE < other.nbytes
        )
        done = [
            *(other for other in skipped if other.stop <= read_to),
            *([request] if request.unused_nbytes <= 0 else []),
        ]
        for other in done:
            self._finish(other)
        if done:
            self._start_queued()

    def _start(self, request: _Request, file: Readable) -> None:
        request.parts = file.start(request.start, request.stop)
        self._nbytes += request.nbytes

    def _finish(self, request: _Request) -> None:
        self._files[request.path].remove(request)
        if not self._files[request.path]:
            del self._files[request.path]
        if request.parts:
            self._nbytes -= request.nbytes
            for _, _, part in request.parts:
                part.cancel()
        request.unused_nbytes = 0

    def _start_queued(self) -> None:
        """Start the next requests, as far as the budget allows."""
        while self._queue:
            request = self._queue[0]
            is_next = not request.parts and request.unused_nbytes > 0
            if is_next and self._nbytes and self._nbytes + request.nbytes > BUDGET:
                return
            self._queue.popleft()
            if is_next:
                self._start(request, self._open_file(request.path))


def _split_batches(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Groups of about `BUDGET` bytes; within a group requests may be sorted by file."""
    group: list[Extent] = []
    nbytes = 0
    for extent in extents:
        group.append(extent)
        nbytes += extent.stop - extent.start
        if nbytes >= BUDGET:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _plan_requests(extents: Iterable[Extent], batch: int) -> Iterator[_Request]:
    """Requests for extents: near ones are joined, long ones are split."""
    for _, group in groupby(sorted(extents), key=attrgetter("path")):
        file_extents = list(group)
        remaining = iter(file_extents)
        for _, high, count in join_ranges(((extent.start, extent.stop) for extent in file_extents), gap=GAP):
            yield from _split_range(list(islice(remaining, count)), high, batch)


def _split_range(extents: Sequence[Extent], high: int, batch: int) -> Iterator[_Request]:
    """Split a range into requests of about equal length, each with how many of its bytes will be used."""
    low = extents[0].start
    count = max(1, -(-(high - low) // REQUEST))
    step = max(1, -(-(high - low) // count))
    used = [0] * count
    for extent in extents:
        for number in range((extent.start - low) // step, min(count, -(-(extent.stop - low) // step))):
            start, stop = low + number * step, low + (number + 1) * step
            common = min(extent.stop, stop) - max(extent.start, start)
            used[number] += common * extent.nbytes // max(1, extent.stop - extent.start)
    for number, used_nbytes in enumerate(used):
        start = low + number * step
        if used_nbytes:
            yield _Request(
                path=extents[0].path, start=start, stop=min(start + step, high), unused_nbytes=used_nbytes, batch=batch
            )
