"""Tiles: how a tensor is read if source and destination have different element orders.

A block of a destination is a range of its row-major order. If the source is transposed, or the destination has only
some columns, a block is spread over the source in runs of a few bytes, and filling block by block would read the
source many times. Such a tensor is read once, in boxes (tiles) that consist of long runs on both sides:

1. `needs_tiles` decides whether a slice is filled this way;
2. `split_tiles` splits the global tensor into boxes, in the order of the source;
3. `resolve_in_tile` finds which elements of a tile go where in a slice;
4. `split_blocks` splits a state that is read without a target, into tiles or into ranges of its row-major order.

>>> _tile_shape((1000, 1000), (1, 0), numel=10_000, gap=100)
(93, 93)
>>> _tile_shape((1000, 1000), (0, 1), numel=10_000, gap=100)
(8, 1000)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from ucp.core.index import Fragment, StateIndex
from ucp.core.region import Box, RegionPair
from ucp.core.slices import (
    Locator,
    Piece,
    block_ranges,
    in_file_order,
    pieces_within,
    resolve,
    resolve_replicas,
    runs_of,
)
from ucp.core.target import Slice
from ucp.core.tensor import GAP, TensorRef, contiguous_strides

MIN_TILED = 1 << 20
"""Bytes below which a state is not read in tiles: reading it several times costs little."""

CALL_BYTES = 32 << 10
"""Bytes that could be read in the time that one separate read call costs."""


def needs_tiles(
    tensor_slice: Slice, state: StateIndex, *, nbytes: int, times: float = 2, cache: dict[object, bool] | None = None
) -> bool:
    """Whether filling a slice in row-major order, `nbytes` at a time, would cost more than `times` its bytes.

    The cost counts bytes that are read in vain, and many short reads (`_cost`). Comparing the slice with its copies in
    the source counts too. `cache`: earlier answers by layout of slice and state; states must live as long as the cache.
    """
    is_range = len(tensor_slice.pairs) == 1 and tensor_slice.pairs[0].global_box.is_flat_in(
        state.global_shape
    )  # true for nearly all slices
    if state.nbytes < MIN_TILED or tensor_slice.start == tensor_slice.stop or (is_range and _is_plain(state, cache)):
        return False
    if cache is None:
        return _is_costly(tensor_slice, state, nbytes, times)
    fragments = tuple(
        (piece.box, piece.replica, piece.term, ref.dtype, ref.strides, isinstance(ref, TensorRef) and bool(ref.codec))
        for piece, ref in ((piece, piece.ref) for piece in state.fragments)
    )  # all that the cost depends on: the layout of the fragments, not their files
    layout = (
        tensor_slice.pairs,
        tensor_slice.local_shape,
        tensor_slice.start,
        tensor_slice.stop,
        tensor_slice.dtype,
        state.global_shape,
        state.overlap,
        fragments,
    )
    key = layout, nbytes, times
    if key not in cache:
        cache[key] = _is_costly(tensor_slice, state, nbytes, times)
    return cache[key]


def _is_costly(tensor_slice: Slice, state: StateIndex, nbytes: int, times: float) -> bool:
    """Whether reading one block costs more than `times` its bytes."""
    stop = min(tensor_slice.stop, tensor_slice.start + nbytes // tensor_slice.dtype.itemsize)
    source = Locator(state)
    return any(
        _cost(pieces) > times * sum(prod(piece.sizes) * piece.ref.dtype.itemsize for piece in pieces)
        for pieces in (
            resolve(tensor_slice, source, tensor_slice.start, stop),
            *resolve_replicas(tensor_slice, source, tensor_slice.start, stop),
        )
    )


def _is_plain(state: StateIndex, cache: dict[object, bool] | None) -> bool:
    """Whether all fragments are ranges of the row-major order. Cached, because it is asked for every slice."""
    is_plain = None if cache is None else cache.get(id(state))
    if is_plain is None:
        is_plain = all(
            isinstance(ref, TensorRef) and ref.is_contiguous and not ref.codec and box.is_flat_in(state.global_shape)
            for ref, box in ((fragment.ref, fragment.box) for fragment in state.fragments)
        )
        if cache is not None:
            cache[id(state)] = is_plain
    return is_plain


def _cost(pieces: Sequence[Piece]) -> int:
    """Bytes that are read for pieces, plus those that could be read in the time that calls for short runs take."""
    cost = 0
    for piece in map(in_file_order, pieces):
        lead, nbytes = runs_of(piece)
        is_decoded = isinstance(piece.ref, TensorRef) and piece.ref.codec
        cost += prod(piece.sizes[:lead]) * (nbytes + CALL_BYTES) if lead and not is_decoded else piece.extent
    return cost


def split_tiles(tensor_slice: Slice, state: StateIndex, *, nbytes: int) -> Iterator[Slice]:
    """The global tensor of a slice, in boxes of at most `nbytes` bytes, in the order of the source."""
    shape, order = state.global_shape, find_source_order(state)
    tile = _tile_shape(
        shape, order, numel=nbytes // tensor_slice.dtype.itemsize, gap=GAP // tensor_slice.dtype.itemsize
    )
    for starts in product(*(range(0, shape[dim], tile[dim]) for dim in order)):
        start_by_dim = dict(zip(order, starts, strict=True))
        offsets = tuple(start_by_dim[dim] for dim in range(len(shape)))
        box = Box(offsets, tuple(min(n, length - o) for n, length, o in zip(tile, shape, offsets, strict=True)))
        pairs = (RegionPair(box, Box.full(box.sizes)),)
        yield replace(tensor_slice, pairs=pairs, local_shape=box.sizes, start=0, stop=box.numel)


def split_blocks(tensor_slice: Slice, state: StateIndex, *, nbytes: int) -> Iterator[Slice]:
    """A slice that is a whole state, in parts of at most `nbytes` bytes; together they read the source once."""
    if 0 < tensor_slice.nbytes <= nbytes:
        yield tensor_slice
    elif needs_tiles(tensor_slice, state, nbytes=nbytes):
        yield from split_tiles(tensor_slice, state, nbytes=nbytes)
    else:
        for low, high in block_ranges(tensor_slice.start, tensor_slice.stop, nbytes // tensor_slice.dtype.itemsize):
            yield replace(tensor_slice, start=low, stop=high)


def find_source_order(state: StateIndex) -> tuple[int, ...]:
    """Dims from outermost to innermost in the source's files: the order of a fragment that is not row-major, if any."""
    usual = tuple(range(len(state.global_shape)))
    for fragment in state.fragments:
        ref = fragment.ref
        if isinstance(ref, TensorRef) and not ref.codec:
            order = tuple(sorted(usual, key=lambda dim: -ref.strides[dim]))
            if order != usual:
                return order
    return usual


def _tile_shape(shape: tuple[int, ...], order: tuple[int, ...], *, numel: int, gap: int) -> tuple[int, ...]:
    """Shape of a box of at most `numel` elements whose runs in the source and in row-major order are about equal.

    The side with the shorter run grows by half, repeatedly. (Elements that are a power of two apart compete for the
    same cache lines; growth by half avoids most such distances.) If fewer than `gap` elements of a dim would be left
    over, the box takes the whole dim: such small gaps would be read anyway.
    """
    tile = [1] * len(shape)
    sides = [order, tuple(range(len(shape)))]
    while sides:
        side = min(sides, key=lambda dims: _run_length(tile, shape, dims))
        dim = next((dim for dim in reversed(side) if tile[dim] < shape[dim]), None)
        if dim is None:
            break
        wider = (3 * tile[dim] + 1) // 2
        if shape[dim] - wider < gap:
            wider = shape[dim]
        if prod(tile) // tile[dim] * wider > numel:
            sides.remove(side)
        else:
            tile[dim] = wider
    return tuple(tile)


def _run_length(tile: Sequence[int], shape: Sequence[int], dims: Sequence[int]) -> int:
    """Number of elements of a tile that follow one another in a tensor whose dims have the order `dims`."""
    run = 1
    for dim in reversed(dims):
        run *= tile[dim]
        if tile[dim] < shape[dim]:
            break
    return run


def resolve_in_tile(tensor_slice: Slice, tile: Slice, shape: tuple[int, ...]) -> Iterator[Piece]:
    """The elements of a tile that a slice holds, as copies from the tile's bytes; `shape`: of the global tensor."""
    box = tile.pairs[0].global_box
    ref = TensorRef(path="", offset=0, dtype=tile.dtype, shape=box.sizes, strides=contiguous_strides(box.sizes))
    tile_state = StateIndex(dtype=tile.dtype, global_shape=shape, fragments=(Fragment(box=box, ref=ref),))
    return pieces_within(tensor_slice, Locator(tile_state), 0, tensor_slice.start, tensor_slice.stop)
