"""Flat buffers of optimizer states, and the parameters as one rank holds them: who is where, as boxes of the whole.

The distributed optimizer lays the parameters of a rank end to end in one buffer per element type, which is then cut
over the data-parallel ranks without regard to them. A file may keep the buffer whole, or in stretches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment, taken
from ucp.core.region import RegionPair, local_flat_pairs
from ucp.core.tensor import TensorRef, contiguous_strides

__all__ = ["Candidate", "FlatBuffer", "Stretch", "fragments_of"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive elements of a buffer."""

    start: int
    """First element, in the buffer."""
    ref: TensorRef
    """Where they are stored; 1-D, consecutive."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.ref.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBuffer:
    """One state of all parameters of a rank, end to end."""

    where: str
    """What it is, for messages."""
    stretches: tuple[Stretch, ...]
    """Its stored elements, in increasing start."""
    numel: int
    """Elements, gaps counted."""

    @classmethod
    def of(cls, ref: TensorRef, where: str) -> FlatBuffer:
        """The elements of a tensor that are stored consecutively, end to end."""
        return cls(where=where, stretches=(Stretch(0, ref.strided(0, (ref.numel,), (1,))),), numel=ref.numel)

    @property
    def starts(self) -> tuple[int, ...]:
        """First elements of its stretches."""
        return tuple(stretch.start for stretch in self.stretches)

    def between(self, start: int, stop: int) -> Iterator[tuple[int, TensorRef]]:
        """What is stored of the elements `start` to `stop`: (first element, in the buffer; where)."""
        at = max(bisect_right(self.stretches, start, key=lambda stretch: stretch.start) - 1, 0)
        for number in range(at, len(self.stretches)):
            stretch = self.stretches[number]
            low, high = max(start, stretch.start), min(stop, stretch.stop)
            if stretch.start >= stop:
                return
            if low < high:
                yield low, stretch.ref.narrow((low - stretch.start,), (high - low,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A parameter as one rank of the model-parallel grid holds it."""

    name: str
    """Its name."""
    local_shape: tuple[int, ...]
    """Elements per dim on that rank."""
    pairs: tuple[RegionPair, ...]
    """Which boxes of the whole the local tensor is made of."""
    refs: tuple[TensorRef, ...]
    """The model's own elements: row-major stretches that, end to end, are the local tensor."""
    kind: str = "dense"
    """Parameters of different kinds do not share a buffer where experts are parallel: "dense" or "expert"."""
    replica: int = 0
    """0 where this rank is the first to hold the parameter; above, it holds a copy."""

    @property
    def numel(self) -> int:
        """Elements on that rank."""
        return sum(ref.numel for ref in self.refs)

    @property
    def dtype(self) -> DType:
        """Type in which the model computes with it."""
        return self.refs[0].dtype


def fragments_of(held: Candidate, buffer: FlatBuffer, start: int) -> Iterator[Fragment]:
    """Pieces of the parameter that lies in `buffer` from element `start` on."""
    strides = contiguous_strides(held.local_shape)
    for low, ref in buffer.between(start, start + held.numel):
        first = low - start
        for run, position in local_flat_pairs(held.local_shape, first, first + ref.numel):
            stored = ref.strided(position, run.sizes, strides)
            piece = Fragment(box=run, ref=stored, replica=held.replica)
            yield from filter(None, (taken(RegionPair(pair.local, pair.whole), piece) for pair in held.pairs))
