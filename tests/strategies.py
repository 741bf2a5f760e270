"""Hypothesis strategies: shapes, tilings, layouts, and sources that hold a given array in every way there is.

Needs hypothesis.
"""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import Layout, Pattern
from ucp.core.region import Box, RegionPair, cut_flat_range
from ucp.core.target import Slice
from ucp.core.tensor import DType, Tensor
from ucp.io.elements import numpy_dtype
from ucp.testing.handmade import Shards, inline

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOATS = tuple(dtype for dtype in DType if dtype.is_floating)
"""Types that may be cast into one another."""


def shapes(
    *, least_dims: int = 0, most_dims: int = 3, least: int = 0, most: int = 6
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes; dims of 0 and 1 element are as likely as others."""
    return st.lists(st.integers(least, most), min_size=least_dims, max_size=most_dims).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box of a tensor of that shape; it may be empty."""
    edges = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in shape]
    return Box(tuple(low for low, _ in edges), tuple(high - low for low, high in edges))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Boxes that tile a tensor: a grid, flat ranges, or boxes cut again and again."""
    match draw(st.sampled_from(("whole", "grid", "flat", "splits"))):
        case "grid":
            boxes = _grid([draw(cuts(length)) for length in shape])
        case "flat":
            edges = draw(cuts(prod(shape)))
            boxes = tuple(b for low, high in pairwise(edges) for b in cut_flat_range(shape, low, high))
        case "splits":
            boxes = _split(draw, Box.full(shape), draw(st.integers(0, 6)))
        case _:
            boxes = (Box.full(shape),)
    return tuple(draw(st.permutations(boxes)))


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """Edges that cut `0:length`, both ends among them."""
    inner = draw(st.lists(st.integers(0, length), max_size=4))
    return [0, *sorted(inner), length]


def _grid(edges: list[list[int]]) -> tuple[Box, ...]:
    spans = [list(pairwise(own)) for own in edges]
    return tuple(
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in product(*spans)
    )


def _split(draw: st.DrawFn, whole: Box, times: int) -> tuple[Box, ...]:
    boxes = [whole]
    for _ in range(times if whole.sizes else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(box.sizes) - 1))
        cut = draw(st.integers(0, box.sizes[dim]))
        boxes += [_part(box, dim, 0, cut), _part(box, dim, cut, box.sizes[dim])]
    return tuple(boxes)


def _part(box: Box, dim: int, low: int, high: int) -> Box:
    offsets = (*box.offsets[:dim], box.offsets[dim] + low, *box.offsets[dim + 1 :])
    return Box(offsets, (*box.sizes[:dim], high - low, *box.sizes[dim + 1 :]))


def random_array(shape: tuple[int, ...], dtype: DType, seed: int, *, bits: bool = False) -> NDArray[Any]:
    """An array of that shape: any bits at all, or small numbers that every dtype can hold."""
    rng = np.random.default_rng(seed)
    if bits and dtype is not DType.BOOL:
        return np.frombuffer(rng.bytes(prod(shape) * dtype.itemsize), dtype=numpy_dtype(dtype)).reshape(shape)
    return rng.integers(0, 2 if dtype is DType.BOOL else 9, size=shape).astype(numpy_dtype(dtype))


@st.composite
def states_of(draw: st.DrawFn, array: NDArray[Any], shards: Shards) -> StateIndex:
    """A state that holds `array`: tiled somehow, every piece stored somehow, some pieces held twice."""
    fragments = []
    for box in draw(tilings(array.shape)):
        ref = draw(_stored(_cut(array, box), shards))
        fragments.append(Fragment(box=box, ref=ref))
    for box in draw(st.lists(boxes_in(array.shape), max_size=3)):
        ref = draw(_stored(_cut(array, box), shards))
        fragments.append(Fragment(box=box, ref=ref, replica=draw(st.integers(1, 2))))
    return StateIndex(dtype=DType(array.dtype.name), global_shape=array.shape, fragments=tuple(fragments))


@st.composite
def _stored(draw: st.DrawFn, piece: NDArray[Any], shards: Shards) -> Tensor:
    match draw(st.sampled_from(("plain", "plain", "ordered", "gapped", "inline"))):
        case "ordered":
            return shards.put(piece, order=draw(st.permutations(range(piece.ndim))), gap=draw(st.integers(0, 2)))
        case "gapped":
            return shards.put(piece, gap=draw(st.integers(1, 3)))
        case "inline":
            return inline(piece)
        case _:
            return shards.put(piece, file=draw(st.sampled_from(("shard.bin", "other.bin"))))


def _cut(array: NDArray[Any], box: Box) -> NDArray[Any]:
    spans = [slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return np.asarray(array[tuple(spans)])


@st.composite
def slices_of(draw: st.DrawFn, state: StateIndex, pattern: st.SearchStrategy[Pattern], dtype: DType) -> Slice:
    """A slice of a state: a box of it, or what one rank of a mesh holds, whole or a flat range of that."""
    if draw(st.booleans()):
        box = draw(boxes_in(state.global_shape))
        pairs: tuple[RegionPair, ...] = (RegionPair(box, Box.full(box.sizes)),)
        local = box.sizes
    else:
        parts = draw(st.integers(1, 4))
        pairs = draw(pattern).regions(state.global_shape, parts, draw(st.integers(0, parts - 1)))
        stops = [pair.local.stops for pair in pairs]
        local = tuple(map(max, zip(*stops, strict=True))) if stops else (0,)
    edges = sorted((draw(st.integers(0, prod(local))), draw(st.integers(0, prod(local)))))
    return Slice(param="p", state="s", dtype=dtype, pairs=pairs, local_shape=local, start=edges[0], stop=edges[1])


def coordinates(layout: Layout) -> list[dict[str, int]]:
    """Every rank of the mesh of a layout."""
    degrees = [range(axis.parts) for axis in layout.axes]
    return [dict(zip((axis.axis for axis in layout.axes), place, strict=True)) for place in product(*degrees)]
