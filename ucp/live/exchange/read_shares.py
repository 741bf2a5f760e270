"""Who reads what: every byte that several ranks need is read by one of them, in equal shares.

The slices are laid one after another into buckets of bounded size, and every bucket is cut into as many parts as there
are readers. A cut may fall inside a tensor. The reader of a part reads it; then all parts are gathered by all.

A bucket holds slices of one cost only, so that equal parts of a bucket are equal amounts to read.

>>> from ucp.core.dtypes import DType
>>> own = Slice(param="w", state="weight", dtype=DType.FLOAT32, pairs=(), local_shape=(6,), start=0, stop=6)
>>> (bucket,) = share_out([own], costs=[1.0], readers=2, bucket_nbytes=1 << 20)
>>> [[(segment.start, segment.stop) for segment in part] for part in bucket.parts]
[[(0, 4)], [(4, 6)]]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ucp.core.slices import Slice

__all__ = ["ALIGNMENT", "Bucket", "Segment", "share_out"]

ALIGNMENT = 16
"""Bytes; a multiple of every itemsize, so that a part never ends inside an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Elements of one slice in a part."""

    item: int
    """Position of the slice among all that are shared out."""
    start: int
    """First element, counted in the slice's local tensor."""
    stop: int
    """One past the last."""
    offset: int
    """Byte of the part where they start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What is gathered at once."""

    parts: tuple[tuple[Segment, ...], ...]
    """One per reader, in the order of the ranks; the last ones may be empty."""
    part_nbytes: int
    """Bytes of every part, a multiple of `ALIGNMENT`."""


def share_out(
    slices: Sequence[Slice], *, costs: Sequence[float], readers: int, bucket_nbytes: int
) -> tuple[Bucket, ...]:
    """Buckets that hold every element of `slices` once.

    `costs`: source bytes to read for a byte of each slice. `bucket_nbytes`: most bytes of a bucket; at least
    `ALIGNMENT` for each reader are taken.
    """
    room = max(bucket_nbytes // (ALIGNMENT * readers), 1) * ALIGNMENT * readers
    buckets: list[Bucket] = []
    order = sorted(range(len(slices)), key=lambda item: costs[item])
    for _, alike in groupby(order, key=lambda item: costs[item]):
        for laid, nbytes in _packed([(item, slices[item]) for item in alike], room):
            buckets.append(_cut(laid, nbytes, slices, readers))
    return tuple(buckets)


def _packed(items: Sequence[tuple[int, Slice]], room: int) -> Iterator[tuple[list[Segment], int]]:
    """The slices one after another, in stretches of at most `room` bytes."""
    laid: list[Segment] = []
    at = 0
    for item, own in items:
        start = own.start
        while start < own.stop:
            if at >= room:
                yield laid, at
                laid, at = [], 0
            stop = min(own.stop, start + (room - at) // own.dtype.itemsize)
            laid.append(Segment(item=item, start=start, stop=stop, offset=at))
            at = _aligned(at + (stop - start) * own.dtype.itemsize)
            start = stop
    if laid:
        yield laid, at


def _cut(laid: Sequence[Segment], nbytes: int, slices: Sequence[Slice], readers: int) -> Bucket:
    part_nbytes = _aligned(-(-nbytes // readers))
    parts: list[list[Segment]] = [[] for _ in range(readers)]
    for run in laid:
        itemsize = slices[run.item].dtype.itemsize
        start = run.start
        while start < run.stop:
            part, offset = divmod(run.offset + (start - run.start) * itemsize, part_nbytes)
            stop = min(run.stop, start + (part_nbytes - offset) // itemsize)
            parts[part].append(Segment(item=run.item, start=start, stop=stop, offset=offset))
            start = stop
    return Bucket(parts=tuple(tuple(part) for part in parts), part_nbytes=part_nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
