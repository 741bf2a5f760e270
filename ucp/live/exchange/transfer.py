"""Read this rank's parts, gather those of all ranks, and put every element where it belongs; bucket by bucket.

While one bucket is gathered and scattered, the part of the next is being read: memory is one bucket and two parts. A
failure on one rank is written at the end of its part, so that all ranks stop after the same bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucp.core.region import local_flat_pairs
from ucp.core.slices import Locator, Slice, block_ranges, resolve
from ucp.live.exchange.read_shares import ALIGNMENT, Bucket, Segment
from ucp.live.parts import LoadItem
from ucp.live.run.ranks import Ranks
from ucp.transfer.gather import Gatherer, Sources, Span
from ucp.transfer.tasks import BLOCK
from ucp.transfer.tiles import is_crosswise

if TYPE_CHECKING:
    import torch

__all__ = ["Reader", "bring"]

_THREADS = 4
"""Threads that read, per rank."""

_STATUS = ALIGNMENT
"""Bytes after every part: the first is 1 when its rank has failed."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A stretch of one segment, at most `BLOCK` bytes where it can be read alone."""

    item: int
    start: int
    stop: int
    view: memoryview


class Reader:
    """Reads parts of buckets, with several threads, and keeps the checksums of what it read."""

    def __init__(self, wants: Sequence[LoadItem], *, tracked: frozenset[str]) -> None:
        self.slices = tuple(want.slice for want in wants)
        self._locators = [Locator(want.source) for want in wants]
        self._is_cut = [not is_crosswise(want.slice, want.source, nbytes=BLOCK) for want in wants]
        self._tracked = tracked
        self._local = threading.local()
        self._gatherers: list[Gatherer] = []
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ucp-read")

    def start(self, segments: Sequence[Segment], views: Sequence[memoryview]) -> list[Future[None]]:
        """Begin to fill the views, one per segment; they are full when all is done."""
        return [self._pool.submit(self._fill, blocks) for blocks in self._batches(segments, views)]

    def scan(self, stretches: Sequence[tuple[str, int, int]]) -> None:
        """Read (path, offset, bytes) for their checksums only. Raises SourceError."""
        _finish([self._pool.submit(self._scan, *stretch) for stretch in stretches])

    @property
    def spans(self) -> list[Span]:
        """What was read of tracked files."""
        return [span for gatherer in self._gatherers for span in gatherer.spans]

    @property
    def nbytes(self) -> int:
        """Bytes read."""
        return sum(gatherer.nbytes_read for gatherer in self._gatherers)

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._pool.shutdown(cancel_futures=True)
        for gatherer in self._gatherers:
            gatherer.sources.close()

    def _batches(self, segments: Sequence[Segment], views: Sequence[memoryview]) -> Iterator[list[_Block]]:
        """Blocks that follow one another, about `BLOCK` bytes together; what is spread over the source is one."""
        batch: list[_Block] = []
        room = BLOCK
        for segment, view in zip(segments, views, strict=True):
            itemsize = self.slices[segment.item].dtype.itemsize
            step = BLOCK // itemsize if self._is_cut[segment.item] else segment.stop - segment.start
            for low, high in block_ranges(segment.start, segment.stop, step):
                if (high - low) * itemsize > room and batch:
                    yield batch
                    batch, room = [], BLOCK
                own = view[(low - segment.start) * itemsize : (high - segment.start) * itemsize]
                batch.append(_Block(segment.item, low, high, own))
                room -= own.nbytes
        if batch:
            yield batch

    def _fill(self, blocks: Sequence[_Block]) -> None:
        wanted = []
        for block in blocks:
            own = self.slices[block.item]
            pieces = resolve(own, self._locators[block.item], block.start, block.stop)
            wanted.append((block.view, own.dtype, pieces))
        self._gatherer().fill_many(wanted)

    def _scan(self, path: str, offset: int, nbytes: int) -> None:
        self._gatherer().scan(path, offset, nbytes)

    def _gatherer(self) -> Gatherer:
        """That of this thread."""
        found: Gatherer | None = getattr(self._local, "gatherer", None)
        if found is None:
            found = self._local.gatherer = Gatherer(sources=Sources(), tracked=self._tracked)
            self._gatherers.append(found)
        return found


def bring(buckets: Sequence[Bucket], reader: Reader, ranks: Ranks, into: Sequence[torch.Tensor]) -> None:
    """Fill the tensors `into`, one per slice, from all buckets. Collective; call it through `together`.

    Every rank takes part in the same gatherings: when one fails, all return after the same bucket, and it raises.
    A process that is alone reads straight into the tensors that allow it.
    """
    direct = {item: view for item, own in enumerate(into) if (view := _memory(own)) is not None}
    places = _Places(reader.slices, direct if ranks.count == 1 else {})
    failure: Exception | None = None
    for bucket, part, reading in _read_ahead(buckets, reader, ranks.rank, places):
        failure = _failure(reading) or failure
        part[bucket.part_nbytes :] = int(failure is not None)
        gathered = ranks.gather(part)
        if bool(gathered[:, bucket.part_nbytes].any()):
            break
        try:
            places.scatter(bucket, gathered, into)
        except Exception as error:  # noqa: BLE001  # told to the other ranks with the next part, raised below
            failure = error
    if failure is not None:
        raise failure


class _Places:
    """Where the elements of segments are read to, and where they go from there."""

    def __init__(self, slices: Sequence[Slice], direct: Mapping[int, memoryview]) -> None:
        self._slices = slices
        self._direct = direct

    def views(self, segments: Sequence[Segment], part: torch.Tensor) -> list[memoryview]:
        """Memory to read each segment into: its final place, or its place in the part."""
        return [self._view(segment, part.numpy().data) for segment in segments]

    def _view(self, segment: Segment, part: memoryview) -> memoryview:
        own = self._slices[segment.item]
        nbytes = (segment.stop - segment.start) * own.dtype.itemsize
        offset = segment.offset
        if segment.item in self._direct:
            part, offset = self._direct[segment.item], (segment.start - own.start) * own.dtype.itemsize
        return part[offset : offset + nbytes]

    def scatter(self, bucket: Bucket, gathered: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        """Copy what the parts hold to its final place. `gathered`: [ranks, bytes]."""
        import torch

        with torch.no_grad():
            for part, segments in zip(gathered.unbind(0), bucket.parts, strict=True):
                for segment in segments:
                    if segment.item not in self._direct:
                        self._copy(segment, part, into[segment.item])

    def _copy(self, segment: Segment, part: torch.Tensor, target: torch.Tensor) -> None:
        own = self._slices[segment.item]
        nbytes = (segment.stop - segment.start) * own.dtype.itemsize
        values = part[segment.offset : segment.offset + nbytes].view(target.dtype)
        if tuple(target.shape) != own.local_shape:  # a stretch of it, in row-major order
            target[segment.start - own.start : segment.stop - own.start].copy_(values)
            return
        for box, position in local_flat_pairs(own.local_shape, segment.start, segment.stop):
            spot = target[tuple(slice(low, high) for low, high in zip(box.offsets, box.stops, strict=True))]
            spot.copy_(values[position : position + box.numel].view(box.sizes))


def _memory(tensor: torch.Tensor) -> memoryview | None:
    """The bytes of a tensor whose elements lie in row-major order in main memory; None for another."""
    import torch

    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return None
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _read_ahead(
    buckets: Sequence[Bucket], reader: Reader, rank: int, places: _Places
) -> Iterator[tuple[Bucket, torch.Tensor, list[Future[None]]]]:
    """Every bucket, the part of `rank` in it and the reading of that part; that of the next bucket has begun too."""
    import torch

    longest = max((bucket.part_nbytes for bucket in buckets), default=0) + _STATUS
    spare = [torch.empty(longest, dtype=torch.uint8) for _ in range(min(2, len(buckets)))]
    begun: list[tuple[Bucket, torch.Tensor, list[Future[None]]]] = []
    for number, bucket in enumerate(buckets):
        part = spare[number % 2][: bucket.part_nbytes + _STATUS]
        segments = bucket.parts[rank]
        begun.append((bucket, part, reader.start(segments, places.views(segments, part))))
        if number:
            yield begun.pop(0)
    yield from begun


def _finish(futures: Sequence[Future[None]]) -> None:
    failure = _failure(futures)
    if failure is not None:
        raise failure


def _failure(futures: Sequence[Future[None]]) -> Exception | None:
    """The first failure among `futures`, once all are done."""
    found = [future.exception() for future in futures]
    return next((error for error in found if isinstance(error, Exception)), None)
