"""The planner: which copies fill a slice of a target from the fragments of a source (`resolve`).

Converting, loading, comparing and reading all carry out these copies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box, RegionPair, full_pairs, intersect, locate_flat_range
from ucp.core.target import Slice
from ucp.core.tensor import GAP, Tensor, contiguous_strides
from ucp.errors import CoverError


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements to copy from one source reference into a buffer."""

    ref: Tensor
    """Source tensor."""
    sizes: tuple[int, ...]
    """Elements to copy, per dim; dims that are consecutive on both sides are merged."""
    src_offset: int
    """Bytes from the start of the source tensor to the first element."""
    src_strides: tuple[int, ...]
    """Bytes to step in the source, per dim."""
    dst_offset: int
    """Elements from the start of the buffer to the first element."""
    dst_strides: tuple[int, ...]
    """Elements to step in the buffer, per dim."""
    term: int = 0
    """Which summand of a mean, or which patch, it is."""
    mean: bool = False
    """Whether the pieces of all terms are to be averaged."""

    @property
    def extent(self) -> int:
        """Bytes of the source from the first element to the end of the last."""
        reach = sum((count - 1) * step for count, step in zip(self.sizes, self.src_strides, strict=True))
        return reach + self.ref.dtype.itemsize


def block_ranges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """`start:stop` cut every `step` elements.

    >>> list(block_ranges(3, 8, 2))
    [(3, 5), (5, 7), (7, 8)]
    """
    for low in range(start, stop, step):
        yield low, min(low + step, stop)


class Locator:
    """Finds the fragments of a state that can hold given elements, without looking at all of them.

    Fragments are sorted by the row-major position of their first element. Flat (ZeRO) fragments are then found by
    bisection; of fragments that interleave (column shards), all that span the range are returned.
    """

    __slots__ = ("_by_replica", "state")

    def __init__(self, state: StateIndex) -> None:
        self.state = state
        self._by_replica: dict[int, _Sorted] | None = None

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replica numbers of the fragments, without 0."""
        return tuple(sorted({fragment.replica for fragment in self.state.fragments if fragment.replica}))

    def near(self, box: Box, replica: int) -> Sequence[Fragment]:
        """Fragments of `replica` that may intersect `box`."""
        fragments = self._sorted.get(replica)
        return fragments.near(box) if fragments else ()

    def flat(self, start: int, stop: int, replica: int) -> Iterable[tuple[Fragment, int, int]] | None:
        """Fragments of `replica` that hold positions `start:stop` of the row-major order, each with the range it holds.

        None if some fragments are not ranges of that order that are stored without gaps.
        """
        if len(self.state.fragments) == 1:  # the commonest state by far
            return self._single(start, stop, replica)
        fragments = self._sorted.get(replica)
        return () if fragments is None else fragments.flat(start, stop)

    def _single(self, start: int, stop: int, replica: int) -> Iterable[tuple[Fragment, int, int]] | None:
        (fragment,) = self.state.fragments
        if fragment.replica != replica:
            return ()
        if self.state.overlap is Overlap.MEAN or not _is_flat(fragment, self.state.global_shape):
            return None
        first = fragment.box.flat_start(self.state.global_shape)
        low, high = max(start, first), min(stop, first + fragment.ref.numel)
        return ((fragment, low, high),) if low < high else ()

    @property
    def _sorted(self) -> dict[int, _Sorted]:
        if self._by_replica is None:
            by_replica: dict[int, list[Fragment]] = {}
            for fragment in self.state.fragments:
                by_replica.setdefault(fragment.replica, []).append(fragment)
            self._by_replica = {replica: _Sorted(fragments, self.state) for replica, fragments in by_replica.items()}
        return self._by_replica


class _Sorted:
    __slots__ = ("fragments", "is_flat", "reach", "shape", "starts")

    def __init__(self, fragments: list[Fragment], state: StateIndex) -> None:
        self.shape = shape = state.global_shape
        placed = [(fragment.box.flat_start(shape), fragment) for fragment in fragments if 0 not in fragment.box.sizes]
        if len(placed) > 1:
            placed.sort(key=lambda item: item[0])
        self.starts = [start for start, _ in placed]
        self.fragments = [fragment for _, fragment in placed]
        self.is_flat = state.overlap is not Overlap.MEAN and all(
            _is_flat(fragment, shape) for fragment in self.fragments
        )
        self.reach = list(accumulate((_flat_stop(fragment.box, shape) for fragment in self.fragments), max))

    def near(self, box: Box) -> Sequence[Fragment]:
        high = bisect_left(self.starts, _flat_stop(box, self.shape))
        return self.fragments[self._first(box.flat_start(self.shape), high) : high]

    def flat(self, start: int, stop: int) -> Iterator[tuple[Fragment, int, int]] | None:
        if not self.is_flat:
            return None
        high = bisect_left(self.starts, stop)
        candidates = slice(self._first(start, high), high)
        near = zip(self.fragments[candidates], self.starts[candidates], strict=True)
        spans = ((fragment, max(start, first), min(stop, first + fragment.ref.numel)) for fragment, first in near)
        return ((fragment, low, end) for fragment, low, end in spans if low < end)

    def _first(self, start: int, high: int) -> int:
        """The first fragment, before number `high`, that can reach position `start`."""
        low = high
        while low and self.reach[low - 1] > start:
            low -= 1
        return low


def _is_flat(fragment: Fragment, shape: tuple[int, ...]) -> bool:
    """Whether a fragment is a range of the row-major order of the global tensor, stored without gaps."""
    ref = fragment.ref
    return ref.is_contiguous and (ref.shape == shape or fragment.box.is_flat_in(shape))


def _flat_stop(box: Box, shape: tuple[int, ...]) -> int:
    """One past the row-major position of the last element of a box that is not empty."""
    position = 0
    for offset, count, length in zip(box.offsets, box.sizes, shape, strict=True):
        position = position * length + offset + count - 1
    return position + 1


def resolve(target: Slice, source: Locator, start: int, stop: int) -> tuple[Piece, ...]:
    """Copies that fill elements `start:stop` of the slice's local tensor; they fill it exactly.

    Raises CoverError when the source pieces leave part of it unfilled.
    """
    full_piece = _full_piece(target, source.state, start, stop)
    if full_piece is not None:
        return (full_piece,)
    pieces = tuple(pieces_within(target, source, 0, start, stop))
    overlap = source.state.overlap
    filled = sum(prod(piece.sizes) for piece in pieces if overlap is not Overlap.PATCHED or not piece.term)
    terms = len({piece.term for piece in pieces}) if overlap is Overlap.MEAN else 1
    if filled != (stop - start) * max(terms, 1):
        raise CoverError(
            f"{target.param}/{target.state}: the source holds {filled} of the {stop - start} elements "
            f"{start}:{stop} of the slice"
        )
    return pieces


def _full_piece(target: Slice, state: StateIndex, start: int, stop: int) -> Piece | None:
    """The single copy, if a full state is asked for and stored as one range (the most common case); else None."""
    shape = state.global_shape
    if start or len(state.fragments) != 1 or target.pairs is not full_pairs(shape) or stop != state.numel:
        return None
    (fragment,) = state.fragments
    is_taken = fragment.replica == fragment.term == 0 and state.overlap is not Overlap.MEAN
    if not stop or not is_taken or fragment.ref.shape != shape or not _is_flat(fragment, shape):
        return None
    itemsize = fragment.ref.dtype.itemsize
    return Piece(
        ref=fragment.ref,
        sizes=(stop,),
        src_offset=0,
        src_strides=(itemsize,),
        dst_offset=0,
        dst_strides=(1,),
        term=fragment.term,
    )


def resolve_replicas(target: Slice, source: Locator, start: int, stop: int) -> tuple[tuple[Piece, ...], ...]:
    """For each replica above 0, the copies of the same elements that it holds; it may hold only part of them."""
    pieces_by_replica = (tuple(pieces_within(target, source, replica, start, stop)) for replica in source.replicas)
    return tuple(pieces for pieces in pieces_by_replica if pieces)


def pieces_within(target: Slice, source: Locator, replica: int, start: int, stop: int) -> Iterator[Piece]:
    """Copies of those of the elements `start:stop` that `replica` of the source holds: all, some or none."""
    flat = _flat_pieces(target, source, replica, start, stop)
    return _boxed_pieces(target, source, replica, start, stop) if flat is None else flat


def _flat_pieces(target: Slice, source: Locator, replica: int, start: int, stop: int) -> Iterator[Piece] | None:
    """`pieces_within`, if slice and fragments are ranges of the row-major order, as most are; else None."""
    if len(target.pairs) != 1:
        return None
    (pair,) = target.pairs
    if pair.local.sizes != target.local_shape or not pair.global_box.is_flat_in(source.state.global_shape):
        return None
    base = pair.global_box.flat_start(source.state.global_shape)
    ranges = source.flat(base + start, base + stop, replica)
    return (
        None
        if ranges is None
        else (_flat_piece(fragment, low, high, base + start, source) for fragment, low, high in ranges)
    )


def _flat_piece(fragment: Fragment, low: int, high: int, start: int, source: Locator) -> Piece:
    itemsize = fragment.ref.dtype.itemsize
    first = fragment.box.flat_start(source.state.global_shape)
    return Piece(
        ref=fragment.ref,
        sizes=(high - low,),
        src_offset=(low - first) * itemsize,
        src_strides=(itemsize,),
        dst_offset=low - start,
        dst_strides=(1,),
        term=fragment.term,
    )


def _boxed_pieces(target: Slice, source: Locator, replica: int, start: int, stop: int) -> Iterator[Piece]:
    strides = contiguous_strides(target.local_shape)
    mean = source.state.overlap is Overlap.MEAN
    for run, position in locate_flat_range(target.local_shape, start, stop):
        near = RegionPair(run, Box.full(run.sizes))
        for pair in filter(None, map(near.after, target.pairs)):
            first = position + sum(o * s for o, s in zip(pair.local.offsets, strides, strict=True))
            for fragment in source.near(pair.global_box, replica):
                shared = intersect(pair.global_box, fragment.box)
                if shared is not None:
                    yield _piece(fragment, shared, pair.global_box, first=first, strides=strides, mean=mean)


def _piece(fragment: Fragment, shared: Box, within: Box, *, first: int, strides: tuple[int, ...], mean: bool) -> Piece:
    ref = fragment.ref
    itemsize = ref.dtype.itemsize
    src_strides = tuple(s * itemsize for s in ref.strides)
    src = sum((o - b) * s for o, b, s in zip(shared.offsets, fragment.box.offsets, src_strides, strict=True))
    dst = first + sum((o - b) * s for o, b, s in zip(shared.offsets, within.offsets, strides, strict=True))
    sizes, src_strides, dst_strides = _merge_dims(shared.sizes, src_strides, strides)
    return Piece(
        ref=ref,
        sizes=sizes,
        src_offset=src,
        src_strides=src_strides,
        dst_offset=dst,
        dst_strides=dst_strides,
        term=fragment.term,
        mean=mean,
    )


def _merge_dims(
    sizes: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The same copy in as few dims as possible, at least one."""
    merged: list[tuple[int, int, int]] = []
    for length, s, d in zip(sizes, src, dst, strict=True):
        if length == 1:
            continue
        if merged and merged[-1][1] == length * s and merged[-1][2] == length * d:
            merged[-1] = (merged[-1][0] * length, s, d)
        else:
            merged.append((length, s, d))
    if not merged:
        return (1,), (0,), (1,)
    lengths, src_steps, dst_steps = zip(*merged, strict=True)
    return lengths, src_steps, dst_steps


def in_file_order(piece: Piece) -> Piece:
    """The same copy with the longest source step first: cut along it, a transposed source is read once, not per row."""
    order = sorted(range(len(piece.sizes)), key=lambda dim: -piece.src_strides[dim])
    return replace(
        piece,
        sizes=tuple(piece.sizes[dim] for dim in order),
        src_strides=tuple(piece.src_strides[dim] for dim in order),
        dst_strides=tuple(piece.dst_strides[dim] for dim in order),
    )


def runs_of(piece: Piece) -> tuple[int, int]:
    """How a piece in file order is best read: (number of leading dims to loop over, bytes of each read).

    >>> from ucp.core.tensor import DType, TensorRef
    >>> ref = TensorRef(path="a", offset=0, dtype=DType.FLOAT32, shape=(9, 8), strides=(5000, 2))
    >>> runs_of(Piece(ref=ref, sizes=(9, 8), src_offset=0, src_strides=(20000, 8), dst_offset=0, dst_strides=(8, 1)))
    (1, 60)
    """
    reach = piece.ref.dtype.itemsize
    lead, run = 0, 0
    for dim in reversed(range(len(piece.sizes))):
        if not lead and piece.sizes[dim] > 1 and piece.src_strides[dim] - reach >= GAP:
            lead, run = dim + 1, reach
        reach += (piece.sizes[dim] - 1) * piece.src_strides[dim]
    return lead, run or reach
