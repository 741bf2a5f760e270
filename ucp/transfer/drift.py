"""Compare copies: whether the replicas of what was taken hold the same, and where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ucp.core.slices import Locator, Piece, resolve, resolve_replicas
from ucp.core.target import Slice
from ucp.core.tensor import DType, TensorRef
from ucp.io.elements import differing, numpy_dtype, strided, viewed, without_payloads
from ucp.transfer.gather import Gatherer

Taken = tuple[Slice, Locator, memoryview]
"""A slice, the pieces of its state, and the bytes that were taken for it."""


def drifts(taken: Sequence[Taken], gatherer: Gatherer) -> Iterator[tuple[Slice, list[str]]]:
    """Slices of which copies differ, with the lines of `drift`. All together are at most a block."""
    if len(taken) > 1 and _agree(taken, gatherer):
        return
    for own, locator, part in taken:
        lines = list(drift(own, locator, part, gatherer))
        if lines:
            yield own, lines


def _agree(taken: Sequence[Taken], gatherer: Gatherer) -> bool:
    """Whether all copies hold what was taken, seen at once; False also where that needs a closer look."""
    alike: dict[tuple[DType, DType], list[tuple[memoryview, Piece]]] = {}
    for own, locator, part in taken:
        for piece in chain.from_iterable(resolve_replicas(own, locator, own.start, own.stop)):
            if own.dtype is not locator.state.dtype and piece.ref.dtype is not own.dtype:
                continue
            if piece.mean or piece.dst_strides != (1,):
                return False
            at, nbytes = (n * own.dtype.itemsize for n in (piece.dst_offset, piece.sizes[0]))
            alike.setdefault((own.dtype, piece.ref.dtype), []).append((part[at : at + nbytes], piece))
    return all(_hold(pairs, *dtypes, gatherer) for dtypes, pairs in alike.items())


def _hold(pairs: Sequence[tuple[memoryview, Piece]], dtype: DType, copied: DType, gatherer: Gatherer) -> bool:
    """Whether pieces of type `copied` hold the bytes of `dtype` beside them, after a cast; read together."""
    wanted = [(piece.sizes[0], copied, (replace(piece, dst_offset=0),)) for _, piece in pairs]
    data = gatherer.read(wanted)[0].obj
    joined = b"".join(view for view, _ in pairs)
    if copied is dtype:
        return joined == data  # bytes with bytes: without numpy, which takes a worker longer to import
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        taken = viewed(memoryview(joined), dtype).astype(numpy_dtype(copied))
    return differing(taken, viewed(memoryview(data), copied)) is None


def drift(own: Slice, locator: Locator, part: memoryview, gatherer: Gatherer) -> Iterator[str]:
    """A line for each stretch of a copy that differs from what was taken, in the copy's own precision.

    Where a cast was asked for, only copies of the type that is written are compared. A copy of one term of a mean is
    compared with that term. `part`: bytes of the slice, which is a block at most.
    """
    uncast = own.dtype is locator.state.dtype
    for pieces in resolve_replicas(own, locator, own.start, own.stop):
        for piece in (piece for piece in pieces if uncast or piece.ref.dtype is own.dtype):
            taken = part
            if piece.mean:  # one summand of it
                taken = memoryview(bytearray(own.nbytes))
                terms = (term for term in resolve(own, locator, own.start, own.stop) if term.term == piece.term)
                gatherer.fill(taken, own.dtype, [replace(term, mean=False) for term in terms])
            yield from _differences(own, piece, taken, gatherer)


def _differences(own: Slice, piece: Piece, part: memoryview, gatherer: Gatherer) -> Iterator[str]:
    """A line for each stretch of a piece that differs from `part`, the bytes it was resolved for."""
    import numpy as np

    dtype = own.dtype
    for stretch, copied in gatherer.values(piece):
        strides = tuple(step * dtype.itemsize for step in stretch.dst_strides)
        offset = stretch.dst_offset * dtype.itemsize
        taken = strided(part, dtype, offset=offset, sizes=stretch.sizes, strides=strides)
        is_cast = copied.dtype != taken.dtype
        if is_cast:
            with np.errstate(over="ignore", invalid="ignore"):
                taken = taken.astype(numpy_dtype(stretch.ref.dtype))
        found = differing(taken, copied)
        if found and is_cast:  # casts need not agree in the payload of a NaN
            found = differing(without_payloads(taken, copied), copied)
        if found:
            path = stretch.ref.path if isinstance(stretch.ref, TensorRef) else "a number in the index"
            yield (
                f"{own.param}/{own.state}: {found.numel} of {copied.size} elements of the {stretch.ref.dtype} copy "
                f"in {path} differ, by up to {found.largest:.6g}"
            )
