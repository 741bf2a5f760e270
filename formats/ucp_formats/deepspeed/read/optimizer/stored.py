"""What ranks stored of a tensor, and the pieces of the whole that it is: where `place` says that they lie.

1. A reader of the files of one model-parallel rank gives each tensor with its layout over the data-parallel ranks.
2. The other axes are added to the layout, and the tensors of all model-parallel ranks put together (`ranks/merge`).
3. `Placer` makes the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment, Stored
from ucp.core.index import StateIndex
from ucp.core.layout import Layout, Overlap, Placed, place
from ucp.core.region import Box
from ucp.core.tensor import TensorRef, contiguous_strides
from ucp.io.pickle.fields import Shape

__all__ = ["LaidOut", "Placer", "State", "StoredTensor"]


class LaidOut(NamedTuple):
    """What some ranks stored."""

    layout: Layout
    """How the tensor lies over them."""
    stored: tuple[Stored, ...]
    """What each stored; where one has several copies, one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as it lies in files."""

    dtype: DType
    """Type of its elements."""
    shape: Shape
    """Elements per dim: of what one model-parallel rank has, until all are put together."""
    parts: tuple[LaidOut, ...]
    """What ranks stored. Model-parallel ranks have layouts of their own where their buffers differ."""

    @classmethod
    def whole(cls, *copies: TensorRef) -> StoredTensor:
        """A tensor that a file holds whole, once or more."""
        stored = tuple(Stored({}, ref) for ref in copies)
        return cls(dtype=copies[0].dtype, shape=copies[0].shape, parts=(LaidOut(Layout(), stored),))

    @property
    def layout(self) -> Layout:
        """That of the first ranks."""
        return self.parts[0].layout

    @property
    def first(self) -> TensorRef:
        """What the first rank stored."""
        return self.parts[0].stored[0].ref


State = StateIndex | StoredTensor
"""A state of a parameter: one number for all of it, or a tensor that is still to be placed."""


class Placer:
    """Makes pieces; where a layout places a shape is found once per rank, as states and parameters share it."""

    def __init__(self) -> None:
        self._take(Layout())

    def _take(self, layout: Layout) -> None:
        self._layout = layout
        self._axes = [axis.axis for axis in layout.every]
        self._known: dict[tuple[Shape, tuple[int, ...]], tuple[Placed, ...]] = {}

    def state(self, state: State) -> StateIndex:
        """The state with its pieces."""
        if isinstance(state, StateIndex):
            return state
        pieces = self.fragments(state)
        means = any(axis.pattern.overlap is Overlap.MEAN for axis in state.layout.axes)
        overlap = Overlap.MEAN if means else Overlap.EXCLUSIVE
        return StateIndex(dtype=state.dtype, global_shape=state.shape, fragments=pieces, overlap=overlap)

    def fragments(self, tensor: StoredTensor, first: int = 0, *, derived: bool = False) -> tuple[Fragment, ...]:
        """Pieces of a whole tensor; one of no elements where it has none.

        `first`: number of the first copy. `derived`: whether ranks computed it from other pieces.
        """
        shape = tensor.shape
        if 0 in shape:
            ref = tensor.first.strided(0, shape, contiguous_strides(shape))
            return (Fragment(box=Box.whole(shape), ref=ref),)
        found: list[Fragment] = []
        held: dict[tuple[int, ...], int] = {}
        copies = {(0, 0): first}
        for layout, stored in tensor.parts:
            if layout is not self._layout and layout != self._layout:
                self._take(layout)
            for own in stored:
                at = tuple([own.coords[axis] for axis in self._axes])
                nth = held.get(at, 0)
                held[at] = nth + 1
                known = self._known.get((shape, at))
                if known is None:
                    known = self._known[shape, at] = place(layout, shape, coords=own.coords)
                for placed in known:
                    replica = copies.setdefault((nth, placed.replica), first + len(copies))
                    found.append(own.piece(placed, layout, replica=replica, derived=derived))
        return tuple(found)
