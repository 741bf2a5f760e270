"""Bytes that will be read next, on their way before they are asked for.

Who copies a checkpoint knows beforehand what it reads, in which order: nothing has to be guessed, as a kernel has to,
and nothing is read in vain. What is announced is joined to requests of some MiB; as many of these are under way, or
have come and are not used yet, as `BUDGET` allows.
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
"""Bytes of one thread that are under way, or have come and wait to be used."""

REQUEST = 4 << 20
"""Bytes of one request, at most."""
GAP = 128 << 10
"""Bytes that are read in vain rather than by a request of their own."""

_PASSED = 50
"""A request that was read past is done with when less than one byte in so many is left of it."""


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

    def __init__(self, opened: Callable[[str], Readable]) -> None:
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

    def drop(self, *, batch: int | None) -> None:
        """Forget what was announced under that number, or an earlier one, and not read; None: whatever was."""
        if batch is None:
            self._waiting.clear()
        for own in [
            own for requests in self._files.values() for own in requests if batch is None or own.batch <= batch
        ]:
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
                self._tidy(request, end)
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

    def _tidy(self, request: _Request, upto: int) -> None:
        """End requests that are used up: what is strided may leave a little of one that was read past."""
        own = self._files[request.path]
        place = own.index(request)
        passed = (other for other in own[:place] if other.parts and other.left * _PASSED < other.nbytes)
        done = [*(other for other in passed if other.stop <= upto), *([request] if request.left <= 0 else [])]
        for other in done:
            self._end(other)
        if done:
            self._go_on()

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
    for _, group in groupby(sorted(extents), key=attrgetter("path")):
        near = list(group)
        rest = iter(near)
        for _, high, count in join_ranges(((own.start, own.stop) for own in near), gap=GAP):
            yield from _cut(list(islice(rest, count)), high, batch)


def _cut(extents: Sequence[Extent], high: int, batch: int) -> Iterator[_Request]:
    """Requests of about equal length for one stretch, each with how many of its bytes will be used."""
    low = extents[0].start
    count = max(1, -(-(high - low) // REQUEST))
    step = max(1, -(-(high - low) // count))
    used = [0] * count
    for own in extents:
        for number in range((own.start - low) // step, min(count, -(-(own.stop - low) // step))):
            start, stop = low + number * step, low + (number + 1) * step
            common = min(own.stop, stop) - max(own.start, start)
            used[number] += common * own.nbytes // max(1, own.stop - own.start)
    for number, left in enumerate(used):
        start = low + number * step
        if left:
            yield _Request(path=extents[0].path, start=start, stop=min(start + step, high), left=left, batch=batch)
