"""Fragments: which part of a whole tensor some stored bytes are.

>>> from ucp.core.dtypes import DType
>>> ref = TensorRef(path="shard", offset=0, dtype=DType.FLOAT32, shape=(2, 4), strides=(4, 1))
>>> Fragment(box=Box((1, 0), (2, 4)), ref=ref).box.numel
8
>>> [str(piece.box) for piece in fragments(Layout(), (2, 4), [Stored({}, ref)])]
['[0:2, 0:4]']
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ucp.core.layout import Layout, Placed, place
from ucp.core.region import Box, RegionPair
from ucp.core.tensor import Tensor, TensorRef, picked


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A piece of a source: a box of the whole, and where its elements lie."""

    box: Box
    """Elements of the global tensor."""
    ref: Tensor
    """Where they are stored; its shape is the size of the box."""
    replica: int = 0
    """0: the bytes to take. Above: a copy that must be equal (after a cast, where its dtype is narrower)."""
    term: int = 0
    """Which summand of a mean it is, where the state combines by MEAN."""
    derived: bool = False
    """Whether a rank computed it from another piece (the model's weight beside its master): compared, never taken."""

    def __post_init__(self) -> None:
        if self.ref.shape != self.box.sizes:
            raise ValueError(f"{self.ref.shape} elements stored for a box of {self.box.sizes}")

    @property
    def path(self) -> str | None:
        """File of the bytes, or None when they stand in the index itself."""
        return self.ref.path if isinstance(self.ref, TensorRef) else None


class Stored(NamedTuple):
    """What one rank stored of a tensor."""

    coords: Mapping[str, int]
    """Place of the rank: mesh axis to index."""
    ref: TensorRef
    """Its local tensor; where the layout has flat axes, a one-dimensional one."""
    start: int = 0
    """Element of a one-dimensional one where its part of this tensor begins."""
    boxes: tuple[tuple[Box, TensorRef], ...] = ()
    """Boxes of the local tensor with the elements of each, where it is not stored in one order."""

    def pieces(
        self, placed: Placed, layout: Layout, *, replica: int | None = None, derived: bool = False
    ) -> tuple[Fragment, ...]:
        """The elements of the box that `layout` placed there; `replica`: number of the copy, if another."""
        number = placed.replica if replica is None else replica
        if self.boxes:
            pair, copy = RegionPair(placed.local, placed.box), {"replica": number, "term": placed.term}
            every = (Fragment(box=box, ref=ref, derived=derived, **copy) for box, ref in self.boxes)
            return tuple(piece for own in every if (piece := taken(pair, own)) is not None)
        if layout.flat:
            ref = self.ref.strided(self.start + placed.offset, placed.box.sizes, placed.strides)
        else:
            ref = self.ref.narrow(placed.local.offsets, placed.box.sizes)
        return (Fragment(box=placed.box, ref=ref, replica=number, term=placed.term, derived=derived),)


def fragments(layout: Layout, global_shape: Sequence[int], stored: Iterable[Stored]) -> tuple[Fragment, ...]:
    """The pieces that ranks stored of a tensor of `global_shape` elements, where `place` says that they lie."""
    return tuple(
        piece
        for own in stored
        for placed in place(layout, global_shape, coords=own.coords)
        for piece in own.pieces(placed, layout)
    )


def with_copies(
    first: Sequence[Fragment], second: Iterable[Fragment], *, derived: bool = False
) -> tuple[Fragment, ...]:
    """The pieces of a tensor, and those of a second one as copies of it, computed from it if `derived`."""
    number = 1 + max((own.replica for own in first), default=-1)
    return (*first, *(replace(own, replica=own.replica + number, derived=derived or own.derived) for own in second))


def taken(pair: RegionPair, fragment: Fragment) -> Fragment | None:
    """The elements of `pair` that a fragment of its whole stores, as a fragment of the local tensor; None for none."""
    near = pair.within(fragment.box)
    if near is None:
        return None
    ref = fragment.ref
    inside = map(int.__sub__, near.whole.offsets, fragment.box.offsets)
    first = sum(map(int.__mul__, inside, ref.strides))
    sizes, strides = near.local.sizes, ref.strides
    if near.dims is not None:
        steps = zip(near.dims, near.steps, strict=True)
        strides = tuple(0 if dim is None else strides[dim] * step for dim, step in steps)
    return replace(fragment, box=near.local, ref=picked(ref, first, sizes, strides))
