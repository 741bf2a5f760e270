"""Laws of patterns over one axis and several, with flat partitions on top: split then union is the identity."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ucp_patterns.chunk import Chunk
from ucp_patterns.cut import Cut
from ucp_patterns.partial import Partial
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard
from ucp_patterns.touched import Touched
from ucp_patterns.unique import Unique

from tests.strategies import coordinates, cuts, shapes
from ucp.core.layout import AxisLayout, Layout, Overlap, compute_local_shape, locate_shard, place
from ucp.core.region import RegionPair, find_gaps


@st.composite
def cases(draw, *, most_axes: int = 3):
    """A shape and a layout that it can have: blocks fit the local length they are cut from."""
    shape = draw(shapes(most_dims=3, most=7))
    local, axes = shape, []
    for name in ("pp", "ep", "tp")[: draw(st.integers(0, most_axes))]:
        parts = draw(st.integers(1, 5))
        pattern = draw(patterns(local, parts))
        axes.append(AxisLayout(name, parts, pattern))
        # A shard by blocks needs one length on all parts: it is only ever the last cut of its dim here.
        local = tuple(-1 if pattern == Shard(dim) or blocked(pattern, dim) else n for dim, n in enumerate(local))
    return shape, Layout(tuple(axes))


def cut_flat(layout: Layout, low: int, high: int, numel: int) -> Layout:
    """`layout`, of whose rank with `numel` elements part 1 of 3 over dp stores a range of the row-major order."""
    return replace(layout, flat=(AxisLayout("dp", 3, Cut(0, ((low, high - low, numel - high),))),))


def blocked(pattern, dim: int) -> bool:
    return isinstance(pattern, Shard) and pattern.dim == dim


@st.composite
def patterns(draw, local: tuple[int, ...], parts: int):
    kinds = ["replicate", "partial", "unique", *(["shard", "shard"] if local else [])]
    match draw(st.sampled_from(kinds)):
        case "replicate":
            return Replicate()
        case "partial":
            return Partial()
        case "unique":
            return Unique(draw(st.integers(0, parts - 1)))
    dim = draw(st.integers(0, len(local) - 1))
    if local[dim] < 0 or draw(st.booleans()):
        return Shard(dim)
    edges = draw(cuts(local[dim]))
    return Shard(dim, tuple(b - a for a, b in itertools.pairwise(edges)))


def held(placed, whole: np.ndarray, numel: int) -> np.ndarray:
    """What a rank stores, by the meaning of `Placed`; -1 where nothing was said."""
    stored = np.full(numel, -1)
    for own in placed:
        for at in np.ndindex(*own.box.sizes):
            position = own.offset + sum(i * s for i, s in zip(at, own.strides, strict=True))
            assert stored[position] == -1, "a place is filled twice"
            stored[position] = whole[tuple(o + i for o, i in zip(own.box.offsets, at, strict=True))]
    return stored


def expected(layout: Layout, whole: np.ndarray, rank: dict[str, int]) -> np.ndarray | None:
    """The local tensor by numpy alone, or None where the rank holds nothing."""
    for axis in layout.axes:
        pattern, parts, index = axis.pattern, axis.parts, rank[axis.axis]
        if isinstance(pattern, Unique) and index != pattern.owner:
            return None
        if isinstance(pattern, Shard):
            blocks = pattern.blocks or (whole.shape[pattern.dim],)
            pieces = np.split(whole, np.cumsum(blocks)[:-1], axis=pattern.dim)
            own = [np.array_split(piece, parts, axis=pattern.dim)[index] for piece in pieces]
            whole = np.concatenate(own, axis=pattern.dim)
    return whole


@given(cases())
def test_a_rank_holds_what_numpy_cuts(case):
    shape, layout = case
    whole = np.arange(prod(shape)).reshape(shape)
    for rank in coordinates(layout):
        wanted = expected(layout, whole, rank)
        placed = place(layout, shape, coords=rank)
        if wanted is None:
            assert placed == ()
        else:
            assert compute_local_shape(layout, shape, rank) == wanted.shape
            assert held(placed, whole, wanted.size).tolist() == wanted.reshape(-1).tolist()


@given(cases(), st.data())
def test_a_flat_partition_holds_a_range_of_the_local_tensor(case, data):
    shape, layout = case
    whole = np.arange(prod(shape)).reshape(shape)
    for rank in coordinates(layout):
        wanted = expected(layout, whole, rank)
        if wanted is None:
            continue
        edges = data.draw(cuts(wanted.size))
        for low, high in itertools.pairwise(edges):
            flat = cut_flat(layout, low, high, wanted.size)
            placed = place(flat, shape, coords={**rank, "dp": 1})
            assert locate_shard(flat, shape, coords={**rank, "dp": 1}).numel == high - low
            assert held(placed, whole, high - low).tolist() == wanted.reshape(-1)[low:high].tolist()


@given(cases(), st.integers(1, 9))
def test_split_then_union_is_the_identity(case, dp):
    """Over every rank of the mesh, its local tensor cut flat over dp, also where dp > numel."""
    shape, layout = case
    whole = np.arange(prod(shape)).reshape(shape)
    layout = replace(layout, flat=(AxisLayout("dp", dp, Chunk(0)),))
    copies: dict[tuple[int, int], list] = {}
    for rank in layout.ranks():
        for own in place(layout, shape, coords=rank):
            copies.setdefault((own.replica, own.term), []).append(own.box)
    if prod(shape):
        assert (0, 0) in copies
    degree = prod(axis.parts for axis in layout.axes if axis.pattern.overlap is not Overlap.EXCLUSIVE)
    assert len(copies) in (0, degree)
    for boxes in copies.values():
        assert find_gaps(shape, boxes) == ()
        union = np.full(shape, -1)
        for box in boxes:
            index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            union[index] = whole[index]
        assert (union == whole).all()


class TestReplicas:
    def test_copies_of_a_flat_range_are_numbered_within_those_of_the_axes(self):
        layout = Layout((AxisLayout("tp", 2, Replicate()),), flat=(AxisLayout("dp", 3, Touched(start=0, share=3)),))
        found = [[own.replica for own in place(layout, (4,), coords=rank)] for rank in layout.ranks()]
        assert found == [[0], [1], [], [3], [4], []]

    def test_two_flat_axes(self):
        """HSDP: replicated over one axis, cut over the other."""
        layout = Layout(flat=(AxisLayout("dp_replicate", 2, Replicate()), AxisLayout("dp_shard", 2, Chunk(0))))
        found = [[(str(own.box), own.replica) for own in place(layout, (3,), coords=rank)] for rank in layout.ranks()]
        assert found == [[("[0:2]", 0)], [("[2:3]", 0)], [("[0:2]", 1)], [("[2:3]", 1)]]


def test_pairs_of_a_shard_by_blocks_follow_one_another():
    pairs = Shard(0, (5, 0, 3)).regions((8, 2), 2, 0)
    assert [(pair.global_box.offsets[0], pair.local.offsets[0], pair.global_box.sizes[0]) for pair in pairs] == [
        (0, 0, 3),
        (5, 3, 2),
    ]
    assert all(isinstance(pair, RegionPair) for pair in pairs)


@pytest.mark.parametrize(
    ("pattern", "shape", "message"),
    [
        (Shard(1), (4,), r"\(4,\) .*dim 1"),
        (Shard(0), (), r"\(\) .*dim 0"),
        (Shard(0, (3, 2)), (4, 4), r"\[3, 2\].* 4 elements"),
        (Unique(2), (4,), "owner 2"),
    ],
)
def test_a_pattern_that_does_not_fit_says_so(pattern, shape, message):
    with pytest.raises(ValueError, match=message):
        pattern.regions(shape, 2, 0)


@pytest.mark.parametrize(("arguments", "got"), [((-1,), r"-1, \(\)"), ((0, (2, -1)), r"0, \(2, -1\)")])
def test_an_invalid_shard_cannot_exist(arguments, got):
    with pytest.raises(ValueError, match=f"got {got}"):
        Shard(*arguments)
