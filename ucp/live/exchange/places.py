"""Where the elements of loads land in the tensors of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ucp.core.region import Box, RegionPair, intersect, local_flat_pairs
from ucp.live.exchange.loads import Load
from ucp.live.exchange.read_shares import Segment
from ucp.live.parts import LoadItem

if TYPE_CHECKING:
    import torch

__all__ = ["Places", "bytes_of", "copy_in", "landings"]


class _Boxed(NamedTuple):
    """A landing tensor whose elements do not lie in the order of the slice."""

    target: torch.Tensor
    """With its dims in the order of the slice."""
    pairs: tuple[RegionPair, ...]
    """Which boxes of the slice go where."""


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
        target, pairs = self._boxed(load)
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

    def _boxed(self, load: Load) -> _Boxed:
        own = self._into[load.item].detach()
        target = own.permute(load.dims) if load.dims else own
        if load.pairs is not None:
            return _Boxed(target, load.pairs)
        whole = Box.whole(load.slice.local_shape)
        return _Boxed(target, (RegionPair(whole, whole),))


def landings(items: Sequence[LoadItem], into: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The landing tensors, those of whole local tensors in their shape."""
    shapes = (own.slice.local_shape if own.slice.is_whole else None for own in items)
    return [
        tensor if shape is None else tensor.detach().view(shape) for shape, tensor in zip(shapes, into, strict=True)
    ]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor (whose strides may be anything where it has one element)."""
    import torch

    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copy_in(pieces: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Put everything where it belongs."""
    for spot, values in pieces:
        spot.copy_(values)


def _at(shared: Box, within: Box, origin: Box) -> tuple[slice, ...]:
    """Where `shared`, a part of `within`, is in a tensor that has `within` at `origin`."""
    starts = (s - w + o for s, w, o in zip(shared.offsets, within.offsets, origin.offsets, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, shared.sizes, strict=True))
