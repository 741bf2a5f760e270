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
from ucp.core.region import Box, RegionPair, intersect
from ucp.core.tensor import Tensor, TensorRef

__all__ = ["Fragment", "Stored", "cut_out", "fragments", "with_copies"]


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
            pair = RegionPair(placed.box, placed.local)
            cuts = (cut_out(pair, box, ref, replica=number, term=placed.term) for box, ref in self.boxes)
            return tuple(replace(own, derived=derived) for own in cuts if own is not None)
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


def cut_out(pair: RegionPair, box: Box, ref: TensorRef, *, replica: int = 0, term: int = 0) -> Fragment | None:
    """The elements of `pair` that `ref` stores, which is `box` of a rank's local tensor; None where it has none.

    `replica`, `term`: see `Fragment`.
    """
    shared = intersect(pair.local, box)
    if shared is None:
        return None
    offsets = tuple(s - a + b for s, a, b in zip(shared.offsets, pair.local.offsets, pair.whole.offsets, strict=True))
    inside = tuple(s - a for s, a in zip(shared.offsets, box.offsets, strict=True))
    own = ref.narrow(inside, shared.sizes)
    return Fragment(box=Box(offsets, shared.sizes), ref=own, replica=replica, term=term)
