"""Read segments with several threads, in ranges of a few MiB."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from math import prod

from ucp.core.slices import Locator, block_ranges, resolve
from ucp.core.tensor import TensorRef
from ucp.live.exchange.loads import Load
from ucp.live.exchange.read_shares import Segment
from ucp.transfer.gather import MAX_READ, Gatherer, Reader

_SPAN = 4 << 20
"""Bytes that a thread reads at a time: what follows one another in a file is read by one call."""

THREAD_NBYTES = 2 * MAX_READ
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


_Batch = list[tuple[Segment, memoryview]]


def start_reading(
    reader: Reader, loads: Sequence[Load], segments: Sequence[Segment], views: Sequence[memoryview]
) -> Reading:
    """Begin to fill the views, one per segment of `loads`."""
    locators = {id(own.source): Locator(own.source) for own in (loads[segment.load] for segment in segments)}

    def fill(batch: _Batch, gatherer: Gatherer) -> _Done:
        began = time.perf_counter()
        wanted = []
        for segment, view in batch:
            own = loads[segment.load]
            pieces = resolve(own.slice, locators[id(own.source)], segment.start, segment.stop)
            wanted.append((view, own.slice.dtype, pieces))
        gatherer.fill_many(wanted)
        refs = ((prod(piece.sizes), piece.ref) for _, _, pieces in wanted for piece in pieces)
        nbytes = sum(numel * ref.dtype.itemsize for numel, ref in refs if isinstance(ref, TensorRef))
        return _Done(began=began, ended=time.perf_counter(), wanted=nbytes)

    batches = _batches(zip(segments, views, strict=True))
    return Reading([reader.submit(partial(fill, batch)) for batch in batches])


def _batches(wanted: Iterator[tuple[Segment, memoryview]]) -> Iterator[_Batch]:
    """Segments, cut where they are long, of about `_SPAN` bytes together."""
    batch: _Batch = []
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
