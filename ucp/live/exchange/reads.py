"""What is read for an item, in which order, and where its elements are stored.

- A slice of a tensor that the files hold transposed is read transposed, so that long ranges of files are read.
- If each rank holds some columns, and it takes longer to read its short pieces of every row than to read whole rows,
  each rank reads a share of the whole rows, and after the exchange takes its columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from ucp.core.index import StateIndex
from ucp.core.region import Box, RegionPair, intersect, locate_flat_range
from ucp.core.slices import Locator, block_ranges, resolve
from ucp.core.target import Slice, full_slice
from ucp.core.tensor import TensorRef
from ucp.live.exchange.read_shares import Segment
from ucp.live.parts import LoadItem
from ucp.transfer.gather import MAX_READ, Gatherer, ThreadedReader
from ucp.transfer.plan.tasks import BLOCK
from ucp.transfer.plan.tiles import find_source_order, needs_tiles

if TYPE_CHECKING:
    import torch

_MOST_COST = 1.5
"""Whole rows are read if reading some columns costs more than this many times their bytes."""
_MOST_WIDENED = 4
"""Whole rows are read only if a rank then receives at most this many times the bytes that it holds."""
_SPAN = 4 << 20
"""Bytes that a thread reads at a time; adjacent ranges of a file are read by one call."""
THREAD_NBYTES = 2 * MAX_READ
"""Bytes of buffers that a thread may need: a strided or cast range, before and after conversion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadItem:
    """A slice to read, and where its elements are stored."""

    item: int
    """Position of its item in the list of this rank."""
    slice: Slice
    """What is read."""
    source: StateIndex
    """Where its bytes are in the checkpoint."""
    dims: tuple[int, ...] = ()
    """Dims of the landing tensor in the order of the slice; empty for the same order."""
    pairs: tuple[RegionPair, ...] | None = None
    """Boxes of the slice, with the boxes of the landing tensor that they fill; None if all of it fills all of that."""

    @property
    def cost(self) -> float:
        """Source bytes to read for a byte of the slice."""
        return self.source.dtype.itemsize / self.slice.dtype.itemsize


def plan_solo_read(number: int, item: LoadItem) -> ReadItem:
    """How one rank alone reads item `number`."""
    read = ReadItem(item=number, slice=item.slice, source=item.source)
    return _permute(read) if needs_tiles(read.slice, read.source, nbytes=BLOCK) else read


def plan_reads(number: int, item: LoadItem) -> tuple[ReadItem, ReadItem]:
    """How a rank reads an item alone, and how it reads it with ranks that exchange what they read."""
    read = ReadItem(item=number, slice=item.slice, source=item.source)
    if not needs_tiles(read.slice, read.source, nbytes=BLOCK, times=_MOST_COST):
        return read, read
    solo = plan_solo_read(number, item)
    full = full_slice(read.slice.param, read.slice.state, read.source, dtype=read.slice.dtype)
    if solo.dims or not read.slice.is_whole or full.nbytes > _MOST_WIDENED * read.slice.nbytes:
        return solo, solo
    return solo, replace(read, slice=full, pairs=read.slice.pairs)


def _permute(read: ReadItem) -> ReadItem:
    """`read` with dims in the order of the source, if that differs and every fragment is a plain range."""
    order = find_source_order(read.source)
    if order == tuple(sorted(order)) or not read.slice.is_whole:
        return read

    def reorder(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in order)

    def permute(box: Box) -> Box:
        return Box(reorder(box.offsets), reorder(box.sizes))

    fragments = []
    for fragment in read.source.fragments:
        ref = fragment.ref
        if not isinstance(ref, TensorRef) or ref.codec:
            return read
        permuted = ref.strided(0, reorder(ref.shape), reorder(ref.strides))
        fragments.append(replace(fragment, box=permute(fragment.box), ref=permuted))
    pairs = tuple(
        pair._replace(global_box=permute(pair.global_box), local=permute(pair.local)) for pair in read.slice.pairs
    )
    return replace(
        read,
        slice=replace(read.slice, pairs=pairs, local_shape=reorder(read.slice.local_shape)),
        source=replace(read.source, global_shape=reorder(read.source.global_shape), fragments=tuple(fragments)),
        dims=order,
    )


class LandingTensors:
    """The tensors of a rank to fill, one per item: with the slice's local shape, or 1-D with as many elements."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def memory(self, read: ReadItem) -> memoryview | None:
        """The bytes of the landing tensor, if elements can be read straight into it; else None."""
        flat = self._flatten(read)
        return flat.numpy().data if flat is not None and flat.device.type == "cpu" else None

    def pieces(self, read: ReadItem, segment: Segment, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Parts of the landing tensor, each with its values. `values`: the bytes of the segment."""
        flat = self._flatten(read)
        if flat is not None:
            low = (segment.start - read.slice.start) * segment.itemsize
            yield flat[low : low + segment.nbytes], values
            return
        tensor, full = self._tensors[read.item].detach(), Box.full(read.slice.local_shape)
        target = tensor.permute(read.dims) if read.dims else tensor
        pairs = (RegionPair(full, full),) if read.pairs is None else read.pairs
        elements = values.view(target.dtype)
        for box, position in locate_flat_range(read.slice.local_shape, segment.start, segment.stop):
            block = elements[position : position + box.numel].view(box.sizes)
            for pair in pairs:
                shared = intersect(box, pair.global_box)
                if shared is not None:
                    in_target = _to_slices(shared, pair.global_box, pair.local)
                    yield target[in_target], block[_to_slices(shared, box, Box.full(box.sizes))]

    def _flatten(self, read: ReadItem) -> torch.Tensor | None:
        """The bytes of the landing tensor, if its elements have the order of the slice in memory; else None."""
        tensor = self._tensors[read.item].detach()
        if read.dims or read.pairs is not None or not tensor.is_contiguous():
            return None
        return view_bytes(tensor)


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor (with one element, its strides may be anything)."""
    import torch

    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _to_slices(shared: Box, within: Box, origin: Box) -> tuple[slice, ...]:
    """Where `shared`, a part of `within`, is in a tensor that has `within` at `origin`."""
    starts = (s - w + o for s, w, o in zip(shared.offsets, within.offsets, origin.offsets, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, shared.sizes, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """When segments were read, and how many bytes of files that took."""

    began: float = 0.0
    """Start in seconds, on the clock of the process."""
    ended: float = 0.0
    """End in seconds, on the same clock."""
    wanted_nbytes: int = 0
    """Bytes of files that were needed."""

    @property
    def seconds(self) -> float:
        """Time it took, without waiting for a free thread."""
        return self.ended - self.began


PendingRead: TypeAlias = Callable[[], ReadResult]
"""Waits for segments that threads are reading. Raises the first error."""
_Batch: TypeAlias = list[tuple[Segment, memoryview]]


def start_reading(
    reader: ThreadedReader, items: Sequence[ReadItem], segments: Sequence[Segment], views: Sequence[memoryview]
) -> PendingRead:
    """Begin to fill the views, one per segment of `items`."""
    sources = (items[segment.slice_number].source for segment in segments)
    locators = {id(source): Locator(source) for source in sources}

    def fill(batch: _Batch, gatherer: Gatherer) -> ReadResult:
        began = time.perf_counter()
        requests = []
        for segment, view in batch:
            read = items[segment.slice_number]
            pieces = resolve(read.slice, locators[id(read.source)], segment.start, segment.stop)
            requests.append((view, read.slice.dtype, pieces))
        gatherer.fill_many(requests)
        refs = ((prod(piece.sizes), piece.ref) for _, _, pieces in requests for piece in pieces)
        nbytes = sum(numel * ref.dtype.itemsize for numel, ref in refs if isinstance(ref, TensorRef))
        return ReadResult(began=began, ended=time.perf_counter(), wanted_nbytes=nbytes)

    futures = [reader.submit(partial(fill, batch)) for batch in _batch(zip(segments, views, strict=True))]

    def finish() -> ReadResult:
        wait(futures)
        results = [future.result() for future in futures] or [ReadResult()]
        return ReadResult(
            began=min(result.began for result in results),
            ended=max(result.ended for result in results),
            wanted_nbytes=sum(result.wanted_nbytes for result in results),
        )

    return finish


def _batch(segments: Iterable[tuple[Segment, memoryview]]) -> Iterator[_Batch]:
    """Segments in batches of about `_SPAN` bytes; long ones are divided."""
    batch: _Batch = []
    free = _SPAN
    for segment, view in segments:
        size = segment.itemsize
        for low, high in block_ranges(segment.start, segment.stop, _SPAN // size):
            if (high - low) * size > free and batch:
                yield batch
                batch, free = [], _SPAN
            first = low - segment.start
            batch.append((replace(segment, start=low, stop=high), view[first * size : (first + high - low) * size]))
            free -= (high - low) * size
    if batch:
        yield batch
