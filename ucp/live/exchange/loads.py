"""What is carried of an item: the slice that a rank holds, in the order and the extent in which it is best read.

- A slice of a tensor that lies transposed in its files is carried transposed: a stretch of it is one of the file.
- Where ranks hold some columns each, in rows so short that reading them one by one takes longer than reading all, they
  carry the whole rows between them, and each takes its columns out: the source is read once, in long stretches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucp.core.index import StateIndex
from ucp.core.region import Box, RegionPair, intersect, local_flat_pairs
from ucp.core.target import Slice, whole_slice
from ucp.core.tensor import TensorRef
from ucp.live.exchange.read_shares import Segment
from ucp.live.parts import LoadItem
from ucp.transfer.plan.tasks import BLOCK
from ucp.transfer.plan.tiles import is_crosswise, source_order

if TYPE_CHECKING:
    import torch

_COSTLY = 1.5
"""Times its bytes that reading some columns may cost before whole rows are carried."""

_MOST_WIDENED = 4
"""Times the bytes that a rank holds, at most, that it receives where whole rows are carried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A slice to read, and where its elements go."""

    item: int
    """Which item, among those of this rank, it is for."""
    slice: Slice
    """What is read."""
    source: StateIndex
    """Where it lies."""
    dims: tuple[int, ...] = ()
    """Dims of the landing tensor in the order of the slice; none where they are in their own."""
    pairs: tuple[RegionPair, ...] | None = None
    """Which boxes of the slice go where in the landing tensor; None: all of it, as it is."""

    @property
    def cost(self) -> float:
        """Source bytes to read for a byte of the slice."""
        return self.source.dtype.itemsize / self.slice.dtype.itemsize


def own_load(number: int, item: LoadItem) -> Load:
    """An item, number `number` of this rank, as one rank alone carries it."""
    own = Load(item=number, slice=item.slice, source=item.source)
    return _permuted(own) if is_crosswise(own.slice, own.source, nbytes=BLOCK) else own


def loads_of(number: int, item: LoadItem) -> tuple[Load, Load]:
    """An item as one rank alone carries it, and as ranks do that exchange what they read."""
    own = Load(item=number, slice=item.slice, source=item.source)
    if not is_crosswise(own.slice, own.source, nbytes=BLOCK, times=_COSTLY):
        return own, own
    alone = own_load(number, item)
    whole = whole_slice(own.slice.param, own.slice.state, own.source, dtype=own.slice.dtype)
    if alone.dims or not own.slice.is_whole or whole.nbytes > _MOST_WIDENED * own.slice.nbytes:
        return alone, alone
    return alone, replace(own, slice=whole, pairs=own.slice.pairs)


def _permuted(own: Load) -> Load:
    """The same with the dims in the order of the source, where that is another one and can be told of all pieces."""
    order = source_order(own.source)
    if order == tuple(sorted(order)) or not own.slice.is_whole:
        return own

    def reorder(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in order)

    def permute(box: Box) -> Box:
        return Box(reorder(box.offsets), reorder(box.sizes))

    pieces = []
    for fragment in own.source.fragments:
        ref = fragment.ref
        if not isinstance(ref, TensorRef) or ref.codec:
            return own
        permuted = ref.strided(0, reorder(ref.shape), reorder(ref.strides))
        pieces.append(replace(fragment, box=permute(fragment.box), ref=permuted))
    pairs = tuple(pair._replace(whole=permute(pair.whole), local=permute(pair.local)) for pair in own.slice.pairs)
    return replace(
        own,
        slice=replace(own.slice, pairs=pairs, local_shape=reorder(own.slice.local_shape)),
        source=replace(own.source, global_shape=reorder(own.source.global_shape), fragments=tuple(pieces)),
        dims=order,
    )


class Places:
    """The landing tensors of a rank, one per item: of the slice's local shape, or as many elements in one dim."""

    def __init__(self, into: Sequence[torch.Tensor]) -> None:
        self._into = into

    def memory(self, load: Load) -> memoryview | None:
        """The bytes of the landing tensor, where elements can be read straight into it."""
        flat = self._flat(load)
        return flat.numpy().data if flat is not None and flat.device.type == "cpu" else None

    def pieces(self, load: Load, segment: Segment, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of the landing tensor, each with what belongs there. `values`: the bytes of the segment."""
        flat = self._flat(load)
        if flat is not None:
            low = (segment.start - load.slice.start) * segment.itemsize
            yield flat[low : low + segment.nbytes], values
            return
        own, whole = self._into[load.item].detach(), Box.whole(load.slice.local_shape)
        target = own.permute(load.dims) if load.dims else own
        pairs = (RegionPair(whole, whole),) if load.pairs is None else load.pairs
        elements = values.view(target.dtype)
        for box, position in local_flat_pairs(load.slice.local_shape, segment.start, segment.stop):
            block = elements[position : position + box.numel].view(box.sizes)
            for pair in pairs:
                shared = intersect(box, pair.whole)
                if shared is not None:
                    yield target[_at(shared, pair.whole, pair.local)], block[_at(shared, box, Box.whole(box.sizes))]

    def _flat(self, load: Load) -> torch.Tensor | None:
        """The bytes of the landing tensor, where its elements lie in the order of the slice."""
        own = self._into[load.item].detach()
        if load.dims or load.pairs is not None or not own.is_contiguous():
            return None
        return bytes_of(own)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor (whose strides may be anything where it has one element)."""
    import torch

    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _at(shared: Box, within: Box, origin: Box) -> tuple[slice, ...]:
    """Where `shared`, a part of `within`, is in a tensor that has `within` at `origin`."""
    starts = (s - w + o for s, w, o in zip(shared.offsets, within.offsets, origin.offsets, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, shared.sizes, strict=True))
