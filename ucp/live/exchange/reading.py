"""Read segments with several threads, in stretches of a few MiB; keep the checksums of what was read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod

from ucp.core.slices import Locator, block_ranges, resolve
from ucp.core.tensor import TensorRef
from ucp.live.exchange.loads import Load
from ucp.live.exchange.read_shares import Segment
from ucp.transfer.gather import STRETCH, Gatherer, Sources, Span

__all__ = ["THREAD_NBYTES", "Reader", "Reading"]

_SPAN = 4 << 20
"""Bytes that a thread reads at a time: what follows one another in a file is read by one call."""

THREAD_NBYTES = 2 * STRETCH
"""Bytes that a thread may need for itself: a strided or cast stretch, before and after."""


class Reading:
    """Segments that are being read."""

    def __init__(self, futures: Sequence[Future[_Done]]) -> None:
        self._futures = futures

    def finish(self) -> _Done:
        """Wait for all of them. Raises what failed first."""
        wait(self._futures)
        done = [future.result() for future in self._futures]
        return _Done(
            began=min((own.began for own in done), default=0.0),
            ended=max((own.ended for own in done), default=0.0),
            wanted=sum(own.wanted for own in done),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """What was read."""

    began: float
    """Seconds, on the clock of the process."""
    ended: float
    """The same."""
    wanted: int
    """Bytes of files that were asked for."""

    @property
    def seconds(self) -> float:
        """Time it took, waiting for its turn not counted."""
        return self.ended - self.began


class Reader:
    """Reads parts of loads."""

    def __init__(self, *, threads: int, tracked: frozenset[str]) -> None:
        self._tracked = tracked
        self._local = threading.local()
        self._gatherers: list[Gatherer] = []
        self._locators: dict[int, Locator] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ucp-read")

    def start(self, loads: Sequence[Load], segments: Sequence[Segment], views: Sequence[memoryview]) -> Reading:
        """Begin to fill the views, one per segment of `loads`."""
        wanted = zip(segments, views, strict=True)
        return Reading([self._pool.submit(self._fill, loads, batch) for batch in _batches(wanted)])

    def scan(self, stretches: Sequence[tuple[str, int, int]]) -> list[Span]:
        """Read (path, offset, bytes), of tracked files, for their checksums only. Raises SourceError."""

        def read(path: str, offset: int, nbytes: int) -> Span:
            gatherer = self._gatherer()
            gatherer.scan(path, offset, nbytes)
            return gatherer.spans[-1]

        return [future.result() for future in [self._pool.submit(read, *stretch) for stretch in stretches]]

    def spans(self, starts: frozenset[tuple[str, int]]) -> list[Span]:
        """What was read of tracked files, what follows one another joined but where one of `starts` is between."""
        joined = Gatherer(sources=Sources(), spans=[span for own in self._gatherers for span in own.spans])
        joined.join_spans(starts)
        return joined.spans

    @property
    def nbytes(self) -> int:
        """Bytes read."""
        return sum(gatherer.nbytes_read for gatherer in self._gatherers)

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._pool.shutdown(cancel_futures=True)
        for gatherer in self._gatherers:
            gatherer.sources.close()

    def _fill(self, loads: Sequence[Load], batch: Sequence[tuple[Segment, memoryview]]) -> _Done:
        began = time.perf_counter()
        wanted = []
        for segment, view in batch:
            own = loads[segment.load]
            # that of a source of several pieces is stored: it has sorted them
            locator = self._locators.get(id(own.source)) or Locator(own.source)
            if len(own.source.fragments) > 1:
                locator = self._locators.setdefault(id(own.source), locator)
            pieces = resolve(own.slice, locator, segment.start, segment.stop)
            wanted.append((view, own.slice.dtype, pieces))
        self._gatherer().fill_many(wanted)
        refs = ((prod(piece.sizes), piece.ref) for _, _, pieces in wanted for piece in pieces)
        nbytes = sum(numel * ref.dtype.itemsize for numel, ref in refs if isinstance(ref, TensorRef))
        return _Done(began=began, ended=time.perf_counter(), wanted=nbytes)

    def _gatherer(self) -> Gatherer:
        """That of this thread."""
        gatherer: Gatherer | None = getattr(self._local, "gatherer", None)
        if gatherer is None:
            gatherer = self._local.gatherer = Gatherer(sources=Sources(), tracked=self._tracked)
            self._gatherers.append(gatherer)
        return gatherer


def _batches(wanted: Iterator[tuple[Segment, memoryview]]) -> Iterator[list[tuple[Segment, memoryview]]]:
    """Segments, cut where they are long, of about `_SPAN` bytes together."""
    batch: list[tuple[Segment, memoryview]] = []
    room = _SPAN
    for segment, view in wanted:
        size = segment.itemsize
        for low, high in block_ranges(segment.start, segment.stop, _SPAN // size):
            if (high - low) * size > room and batch:
                yield batch
                batch, room = [], _SPAN
            first = low - segment.start
            own = Segment(load=segment.load, start=low, stop=high, offset=0, itemsize=size)
            batch.append((own, view[first * size : (first + high - low) * size]))
            room -= (high - low) * size
    if batch:
        yield batch
