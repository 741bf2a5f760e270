"""A tensor of a rank's file seen as what the model means by it: other order of rows, several experts in one.

A view says which elements of the stored tensor are which elements of the parameter as that rank holds it, as boxes with
strides; nothing is moved. It is the same for the weight, the master and the moments, which are all stored alike.

The rows of a fused query-key-value projection had three orders over the years, by the version of the checkpoint
(megatron/legacy checkpointing.py: fix_query_key_value_ordering):

| version | rows |
|---|---|
| 0 | [3, heads, head_dim] |
| 1.0 | [heads, head_dim, 3] |
| 2.0 and later | [heads, 3, head_dim], which is what a parameter has here |

>>> view = old_attention_rows((6, 5), heads=2, parts=3, version=1.0)
>>> [(str(piece.box), piece.offset, piece.strides) for piece in view.pieces[:2]]
[('[0:1, 0:5]', 0, (15, 1)), ('[1:2, 0:5]', 5, (15, 1))]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from ucp.core.fragments import Stored
from ucp.core.region import Box
from ucp.core.tensor import TensorRef, contiguous_strides

__all__ = ["View", "ViewPiece", "experts_in_one", "old_attention_rows", "plain"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewPiece:
    """A box of the parameter, and where it lies in the stored tensor."""

    box: Box
    """Elements of the parameter, as the rank holds it."""
    offset: int
    """Element of the stored tensor, row-major, where the box starts."""
    strides: Shape
    """Elements to step in the stored tensor, per dim of the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A stored tensor as a parameter."""

    shape: Shape
    """Elements per dim of the parameter, as the rank holds it."""
    pieces: tuple[ViewPiece, ...]
    """Where they lie."""

    def of(self, ref: TensorRef, coords: Mapping[str, int]) -> Stored:
        """What the rank at `coords` stored of the parameter; `ref`: the stored tensor, consecutive."""
        boxes = tuple((own.box, ref.strided(own.offset, own.box.sizes, own.strides)) for own in self.pieces)
        return Stored(coords, boxes[0][1]) if len(boxes) == 1 else Stored(coords, ref, boxes=boxes)


def plain(shape: Shape) -> View:
    """The stored tensor is the parameter."""
    piece = ViewPiece(box=Box.whole(shape), offset=0, strides=contiguous_strides(shape))
    return View(shape=shape, pieces=(piece,))


def old_attention_rows(shape: Shape, *, heads: int, parts: int, version: float) -> View:
    """The view of a fused projection of a checkpoint before version 2.0.

    Parameters
    ----------
    shape
        Of the stored tensor: [heads * parts * head_dim, hidden], or of a bias without the last.
    heads
        Heads on this rank.
    parts
        3 for query, key and value; 2 for key and value.
    version
        Version of the checkpoint.

    Raises ValueError when the rows do not divide.
    """
    if version >= 2.0:
        return plain(shape)
    if not shape or shape[0] % (heads * parts):
        raise ValueError(f"{list(shape)} has no rows for {parts} parts of {heads} heads")
    dim = shape[0] // (heads * parts)
    row = prod(shape[1:])
    rest = contiguous_strides(shape)[1:]
    pieces = []
    for head, part in product(range(heads), range(parts)):
        first, step = ((part * heads + head) * dim, 1) if version < 1.0 else (head * dim * parts + part, parts)
        box = Box(((head * parts + part) * dim, *(0 for _ in rest)), (dim, *shape[1:]))
        pieces.append(ViewPiece(box=box, offset=first * row, strides=(step * row, *rest)))
    return View(shape=shape, pieces=tuple(pieces))


def experts_in_one(shape: Shape, strides: Shape) -> tuple[View, ...]:
    """A view per expert of a tensor that holds several. `shape`, `strides`: of it, the dim of the experts first.

    >>> experts_in_one((2, 3, 4), (12, 1, 3))[1].pieces[0]
    ViewPiece(box=Box(offsets=(0, 0), sizes=(3, 4)), offset=12, strides=(1, 3))
    """
    box = Box.whole(shape[1:])
    return tuple(
        View(shape=shape[1:], pieces=(ViewPiece(box=box, offset=at * strides[0], strides=strides[1:]),))
        for at in range(shape[0])
    )
