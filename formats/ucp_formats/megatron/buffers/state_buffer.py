"""A flat buffer of the distributed optimizer, and the parameters that may be in it.

A buffer holds one state of all parameters of a rank, end to end; a file stores it whole or in ranges.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ucp.core.index import Fragment
from ucp.core.region import RegionPair, locate_flat_range
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.core.union import map_fragment


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Consecutive elements of a buffer."""

    start: int
    """First element, in the buffer."""
    ref: TensorRef
    """Where they are stored; 1-D, consecutive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBuffer:
    """One state of all parameters of a rank, end to end."""

    where: str
    """Description for messages."""
    ranges: tuple[StoredRange, ...]
    """Its stored elements, in increasing start."""
    numel: int
    """Elements, including those that are not stored."""

    @classmethod
    def from_tensor(cls, ref: TensorRef, where: str) -> StateBuffer:
        """The elements of a contiguous tensor."""
        return cls(where=where, ranges=(StoredRange(0, ref.strided(0, (ref.numel,), (1,))),), numel=ref.numel)

    def iter_stored(self, start: int, stop: int) -> Iterator[tuple[int, TensorRef]]:
        """The stored parts of elements `start` to `stop`, each with its first element in the buffer."""
        first = max(bisect_right(self.ranges, start, key=lambda stored: stored.start) - 1, 0)
        for stored in islice(self.ranges, first, None):
            if stored.start >= stop:
                return
            low, high = max(start, stored.start), min(stop, stored.start + stored.ref.numel)
            if low < high:
                yield low, stored.ref.narrow((low - stored.start,), (high - low,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A parameter as one rank of the model-parallel grid holds it."""

    name: str
    """Its name."""
    local_shape: tuple[int, ...]
    """Elements per dim on that rank."""
    pairs: tuple[RegionPair, ...]
    """Which boxes of the global tensor the local tensor is made of."""
    refs: tuple[TensorRef, ...]
    """The model's weights: contiguous tensors that, end to end, make up the local tensor."""
    kind: str = "dense"
    """"dense" or "expert": with expert parallelism, the two kinds have separate buffers."""
    replica: int = 0
    """0 on the first rank that holds the parameter; above 0 on ranks with a copy."""

    @property
    def numel(self) -> int:
        """Elements on that rank."""
        return sum(ref.numel for ref in self.refs)

    @property
    def dtype(self) -> DType:
        """Type that the model computes in."""
        return self.refs[0].dtype


def cut_fragments(candidate: Candidate, buffer: StateBuffer, start: int) -> Iterator[Fragment]:
    """Fragments of a parameter that is stored in `buffer` from element `start` on."""
    shape = candidate.local_shape
    strides = contiguous_strides(shape)
    for low, ref in buffer.iter_stored(start, start + candidate.numel):
        first = low - start
        for box, position in locate_flat_range(shape, first, first + ref.numel):
            local = Fragment(box=box, ref=ref.strided(position, box.sizes, strides), replica=candidate.replica)
            yield from filter(
                None, (map_fragment(RegionPair(pair.local, pair.global_box), local) for pair in candidate.pairs)
            )
