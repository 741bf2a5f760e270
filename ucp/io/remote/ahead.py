"""Bytes that will be read next, on their way before they are asked for.

Who copies a checkpoint knows beforehand what it reads, in which order: nothing has to be guessed, as a kernel has to,
and nothing is read in vain. What is announced is joined to requests of some MiB; as many of these are under way, or
have come and are not used yet, as `BUDGET` allows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

__all__ = ["BUDGET", "Ahead", "Extent"]

BUDGET = 32 << 20
"""Bytes of one thread that are under way, or have come and wait to be used."""

_REQUEST = 4 << 20
_GAP = 128 << 10
"""Bytes that are read in vain rather than by a request of their own."""


class Extent(NamedTuple):
    """Bytes of a file that will be read."""

    path: str
    """File."""
    start: int
    """First byte."""
    stop: int
    """One past the last."""
    nbytes: int
    """How many of them will be used; fewer than there are where a piece is strided."""


class Readable(Protocol):
    """A file of which reads can be begun."""

    path: str

    def start(self, start: int, stop: int) -> list[tuple[int, int, Future[bytes]]]:
        """Requests under way: first byte, one past the last, what comes."""


class Opener(Protocol):
    """Who opens files by path."""

    def __call__(self, path: str) -> Readable: ...


@dataclass(slots=True, eq=False)
class _Request:
    """A stretch of a file that is read at once."""

    path: str
    start: int
    stop: int
    left: int
    """Bytes of it that are still to be used."""
    batch: int
    """Announcement that it is of."""
    parts: list[tuple[int, int, Future[bytes]]] = field(default_factory=list)
    """What was begun."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Ahead:
    """What one thread will read."""

    def __init__(self, opened: Opener) -> None:
        """`opened`: gives the file at a path."""
        self._opened = opened
        self._waiting: deque[_Request] = deque()
        self._files: dict[str, list[_Request]] = {}
        self._nbytes = 0

    def expect(self, extents: Iterable[Extent], *, batch: int) -> None:
        """Announce what will be read, in about this order, under a number."""
        for group in _groups(extents):
            for request in _requests(group, batch):
                self._files.setdefault(request.path, []).append(request)
                self._waiting.append(request)
        for own in self._files.values():
            own.sort(key=lambda request: request.start)
        self._go_on()

    def drop(self, *, batch: int) -> None:
        """Forget what was announced under that number, or an earlier one, and not read."""
        for own in [own for requests in self._files.values() for own in requests if own.batch <= batch]:
            self._end(own)
        self._go_on()

    def take(self, file: Readable, view: memoryview, offset: int, *, wanted: int) -> Iterator[tuple[int, int]]:
        """Fill what was announced of a buffer; gives the rest: (first byte, one past the last) of the file.

        `wanted`: how many of the bytes will be used.
        """
        at, stop = offset, offset + view.nbytes
        share = wanted / max(1, view.nbytes)
        while at < stop:
            request, following = self._find(file.path, at)
            if request is None:
                end = min(stop, following)
                yield at, end
            else:
                end = min(stop, request.stop)
                self._copy(file, request, view[at - offset : end - offset], at)
                request.left -= round((end - at) * share)
                if request.left <= 0:
                    self._end(request)
                    self._go_on()
            at = end

    def _find(self, path: str, offset: int) -> tuple[_Request | None, int]:
        """The request of a byte, or where the next one begins."""
        own = self._files.get(path, ())
        number = bisect_right(own, offset, key=lambda request: request.start) - 1
        for request in reversed(own[max(0, number - 1) : number + 1]):
            if request.start <= offset < request.stop:
                return request, request.stop
        following = own[number + 1].start if number + 1 < len(own) else 1 << 63
        return None, following

    def _copy(self, file: Readable, request: _Request, view: memoryview, offset: int) -> None:
        if not request.parts:
            self._begin(request, file)
        stop = offset + view.nbytes
        for low, high, data in request.parts:
            start, end = max(low, offset), min(high, stop)
            if start < end:
                view[start - offset : end - offset] = memoryview(data.result())[start - low : end - low]

    def _begin(self, request: _Request, file: Readable) -> None:
        request.parts = file.start(request.start, request.stop)
        self._nbytes += request.nbytes

    def _end(self, request: _Request) -> None:
        self._files[request.path].remove(request)
        if not self._files[request.path]:
            del self._files[request.path]
        if request.parts:
            self._nbytes -= request.nbytes
            for _, _, part in request.parts:
                part.cancel()
        request.left = 0

    def _go_on(self) -> None:
        """Begin the next requests, as far as there is room."""
        while self._waiting:
            request = self._waiting[0]
            is_next = not request.parts and request.left > 0
            if is_next and self._nbytes and self._nbytes + request.nbytes > BUDGET:
                return
            self._waiting.popleft()
            if is_next:
                self._begin(request, self._opened(request.path))


def _groups(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Neighbours in time, some `BUDGET` of bytes each: within one, requests may be in the order of the files."""
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


def _requests(extents: Iterable[Extent], batch: int) -> Iterator[_Request]:
    """Extents of some files, joined where they are near one another and cut where they are long."""
    low = high = used = 0
    path = ""
    for extent in sorted(extents):
        if extent.path != path or extent.start > high + _GAP:
            yield from _cut(path, low, high, used, batch)
            path, low, high, used = extent.path, extent.start, extent.stop, 0
        high, used = max(high, extent.stop), used + extent.nbytes
    yield from _cut(path, low, high, used, batch)


def _cut(path: str, low: int, high: int, used: int, batch: int) -> Iterator[_Request]:
    """Requests of about equal length for one stretch."""
    count = -(-(high - low) // _REQUEST)
    step = -(-(high - low) // count) if count else 1
    for start in range(low, high, step):
        stop = min(start + step, high)
        left = -(-used * (stop - start) // (high - low))
        yield _Request(path=path, start=start, stop=stop, left=max(1, left), batch=batch)
