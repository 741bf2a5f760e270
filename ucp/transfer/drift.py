"""Compares the copies of a state in a source: whether they equal the copy that is read, and where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ucp.core.slices import Locator, Piece, resolve, resolve_replicas
from ucp.core.target import Slice
from ucp.core.tensor import DType, TensorRef
from ucp.io.elements import differing, numpy_dtype, strided, viewed, without_payloads
from ucp.transfer.gather import Gatherer

CheckedSlice = tuple[Slice, Locator, memoryview]
"""A slice, the locator of its state, and the bytes that were read for it."""


def find_drifts(checked: Sequence[CheckedSlice], gatherer: Gatherer) -> Iterator[tuple[Slice, list[str]]]:
    """Slices whose copies differ, each with the lines of `describe_drift`. All slices together are at most a block."""
    if len(checked) > 1 and _all_agree(checked, gatherer):
        return
    for tensor_slice, locator, part in checked:
        lines = list(describe_drift(tensor_slice, locator, part, gatherer))
        if lines:
            yield tensor_slice, lines


def _all_agree(checked: Sequence[CheckedSlice], gatherer: Gatherer) -> bool:
    """Whether all copies equal what was read, by a fast comparison; also False if this comparison is inconclusive."""
    alike: dict[tuple[DType, DType], list[tuple[memoryview, Piece]]] = {}
    for tensor_slice, locator, part in checked:
        for piece in chain.from_iterable(
            resolve_replicas(tensor_slice, locator, tensor_slice.start, tensor_slice.stop)
        ):
            if tensor_slice.dtype is not locator.state.dtype and piece.ref.dtype is not tensor_slice.dtype:
                continue
            if piece.mean or piece.dst_strides != (1,):
                return False
            at, nbytes = (n * tensor_slice.dtype.itemsize for n in (piece.dst_offset, piece.sizes[0]))
            alike.setdefault((tensor_slice.dtype, piece.ref.dtype), []).append((part[at : at + nbytes], piece))
    return all(_hold_bytes(pairs, *dtypes, gatherer) for dtypes, pairs in alike.items())


def _hold_bytes(pairs: Sequence[tuple[memoryview, Piece]], dtype: DType, copied: DType, gatherer: Gatherer) -> bool:
    """Whether pieces of dtype `copied` equal the bytes paired with them, of `dtype`, after a cast to `copied`."""
    wanted = [(piece.sizes[0], copied, (replace(piece, dst_offset=0),)) for _, piece in pairs]
    data = gatherer.read(wanted)[0].obj
    joined = b"".join(view for view, _ in pairs)
    if copied is dtype:
        return joined == data  # compares bytes, without numpy, whose import takes a worker longer
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        expected = viewed(memoryview(joined), dtype).astype(numpy_dtype(copied))
    return differing(expected, viewed(memoryview(data), copied)) is None


def describe_drift(tensor_slice: Slice, locator: Locator, part: memoryview, gatherer: Gatherer) -> Iterator[str]:
    """A line for each range of a copy that differs from what was read, compared in the copy's dtype.

    If the slice is cast, only copies that already have its dtype are compared. A copy of one term of a mean is compared
    with that term. `part`: bytes of the slice, at most a block.
    """
    uncast = tensor_slice.dtype is locator.state.dtype
    for pieces in resolve_replicas(tensor_slice, locator, tensor_slice.start, tensor_slice.stop):
        for piece in (piece for piece in pieces if uncast or piece.ref.dtype is tensor_slice.dtype):
            expected = part
            if piece.mean:  # a copy of one summand
                expected = memoryview(bytearray(tensor_slice.nbytes))
                terms = (
                    term
                    for term in resolve(tensor_slice, locator, tensor_slice.start, tensor_slice.stop)
                    if term.term == piece.term
                )
                gatherer.fill(expected, tensor_slice.dtype, [replace(term, mean=False) for term in terms])
            yield from _describe_differences(tensor_slice, piece, expected, gatherer)


def _describe_differences(tensor_slice: Slice, piece: Piece, part: memoryview, gatherer: Gatherer) -> Iterator[str]:
    """A line for each range of a piece that differs from `part`, the bytes of the slice that it is a copy of."""
    import numpy as np

    dtype = tensor_slice.dtype
    for stripe, copied in gatherer.read_values(piece):
        strides = tuple(step * dtype.itemsize for step in stripe.dst_strides)
        offset = stripe.dst_offset * dtype.itemsize
        expected = strided(part, dtype, offset=offset, sizes=stripe.sizes, strides=strides)
        is_cast = copied.dtype != expected.dtype
        if is_cast:
            with np.errstate(over="ignore", invalid="ignore"):
                expected = expected.astype(numpy_dtype(stripe.ref.dtype))
        difference = differing(expected, copied)
        if difference and is_cast:  # two casts of a NaN can differ in its payload
            difference = differing(without_payloads(expected, copied), copied)
        if difference:
            path = stripe.ref.path if isinstance(stripe.ref, TensorRef) else "a number in the index"
            yield (
                f"{tensor_slice.param}/{tensor_slice.state}: {difference.numel} of {copied.size} elements of the "
                f"{stripe.ref.dtype} copy in {path} differ, by up to {difference.largest:.6g}"
            )
