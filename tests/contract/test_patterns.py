from __future__ import annotations

import pytest
from ucp_patterns.chunk import Chunk
from ucp_patterns.cut import Cut
from ucp_patterns.partial import Partial
from ucp_patterns.partition import Partition
from ucp_patterns.pieces import Indexes, Pieces
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard
from ucp_patterns.strided import Strided
from ucp_patterns.touched import Touched
from ucp_patterns.unique import Unique

from ucp.core.layout import Overlap
from ucp.core.region import Box, RegionPair
from ucp.testing import PatternContract

SHAPES = [(), (0,), (1,), (7,), (8, 3), (0, 4), (3, 0), (2, 3, 5)]
PARTS = [1, 2, 3, 8]


class TestUnique(PatternContract):
    cases = tuple((Unique(owner), shape, parts) for shape in SHAPES for parts in PARTS for owner in {0, parts - 1})


class TestReplicate(PatternContract):
    cases = tuple((Replicate(), shape, parts) for shape in SHAPES for parts in PARTS)

    def test_copies_are_equal(self):
        assert Replicate().overlap is Overlap.EQUAL


class TestReplicateOnSome(PatternContract):
    """An embedding that the first and the last stage of a pipeline share."""

    cases = tuple((Replicate(holders=(0, parts - 1)), shape, parts) for shape in SHAPES for parts in PARTS if parts > 1)

    def test_holders_are_parts_in_order(self):
        with pytest.raises(ValueError, match=r"got \(3, 0\)"):
            Replicate(holders=(3, 0))
        with pytest.raises(ValueError, match=r"\[0, 3\] .* 2 parts"):
            Replicate(holders=(0, 3)).regions((4,), 2, 0)


class TestPartial(PatternContract):
    cases = tuple((Partial(), shape, parts) for shape in SHAPES for parts in PARTS)

    def test_versions_are_averaged(self):
        assert Partial().overlap is Overlap.MEAN


class TestShard(PatternContract):
    cases = tuple((Shard(dim), shape, parts) for shape in SHAPES for parts in PARTS for dim in range(len(shape)))


class TestShardByBlocks(PatternContract):
    """Shard-NC: gate and up, q and k and v of unequal sizes, blocks shorter than the parts are many."""

    cases = tuple(
        (Shard(dim, blocks), shape, parts)
        for shape, dim, blocks in [
            ((12, 3), 0, (6, 6)),
            ((12, 3), 0, (8, 2, 2)),
            ((12, 3), 0, (7, 0, 5)),
            ((3, 5), 1, (1, 4)),
            ((4,), 0, (1, 1, 1, 1)),
            ((0, 2), 0, ()),
            ((0, 2), 0, (0, 0)),
        ]
        for parts in PARTS
    )

    def test_it_is_named_by_its_blocks(self):
        assert Shard(1, (4, 2)).name == "shard(dim=1, blocks=[4, 2])"
        assert Shard(0).name == "shard(dim=0)"


class TestShardWithCopies(PatternContract):
    """Grouped attention with fewer key and value heads than ranks: q cut over all, k and v held by several."""

    cases = tuple(
        (Shard(dim, blocks, copies), shape, parts)
        for shape, dim, blocks, copies in [
            ((12, 3), 0, (8, 2, 2), (1, 2, 2)),
            ((10,), 0, (8, 2), (1, 4)),
            ((3, 12), 1, (8, 1, 3), (1, 8, 4)),
            ((12, 3), 0, (6, 6), (1, 1)),
            ((9, 2), 0, (7, 2), (2, 1)),
        ]
        for parts in (8, 16)
    )

    def test_copies_are_equal(self):
        assert Shard(0, (8, 2), (1, 2)).overlap is Overlap.EQUAL
        assert Shard(0, (8, 2), (1, 1)).overlap is Overlap.EXCLUSIVE

    def test_neighbours_hold_the_same(self):
        pattern = Shard(0, (8, 2), (1, 2))
        held = [pattern.regions((10,), 4, index)[1] for index in range(4)]
        assert [(pair.global_box.offsets[0], pair.copy) for pair in held] == [(8, 0), (8, 1), (9, 0), (9, 1)]

    def test_copies_must_divide_the_parts(self):
        with pytest.raises(ValueError, match=r"copies .* 3 parts"):
            Shard(0, (8, 2), (1, 2)).regions((10,), 3, 0)

    @pytest.mark.parametrize(
        ("arguments", "got"),
        [
            ((0, (4, 2), (1,)), r"\(1,\)"),
            ((0, (4,), (0,)), r"\(0,\)"),
            ((0, (), (), 2), r"2 of \(\)"),
            ((0, (4,), (), 0), r"0 of \(4,\)"),
        ],
    )
    def test_copies_and_repeats_are_of_blocks(self, arguments, got):
        with pytest.raises(ValueError, match=f"got {got}"):
            Shard(*arguments)

    @pytest.mark.parametrize(("blocks", "repeat"), [((1,), 8193), ((1, 1), 4097), ((1,) * 8193, 1), ((1,), 10**9)])
    def test_blocks_have_a_bound(self, blocks, repeat):
        with pytest.raises(ValueError, match="at most 8,192 blocks"):
            Shard(0, blocks, (), repeat)


class TestShardRepeated(PatternContract):
    """The paper's fused [n_experts * hidden_out, hidden_in]: the blocks of one expert, for every expert."""

    cases = tuple(
        (Shard(dim, blocks, copies, repeat), shape, parts)
        for shape, dim, blocks, copies, repeat in [
            ((12, 3), 0, (3,), (), 4),
            ((12, 3), 0, (2, 1), (), 4),
            ((2, 15), 1, (4, 1), (1, 2), 3),
        ]
        for parts in (2, 4)
    )


class TestCut(PatternContract):
    """Recorded widths: heads that do not divide, parts without any of a block."""

    cases = (
        (Cut(0, ((3, 1),)), (4, 3), 2),
        (Cut(1, ((2, 2, 1), (1, 0, 1))), (3, 7), 3),
        (Cut(0, ((0, 0), (5, 0))), (5,), 2),
        (Cut(0, ((0, 0),)), (0, 2), 2),
    )

    def test_it_is_named_by_its_widths(self):
        assert Cut(0, ((3, 1), (1, 1))).name == "cut(dim=0, widths=[[3, 1], [1, 1]])"


def _rows(at: int, length: int, local: int, *, copy: int = 0) -> RegionPair:
    return RegionPair(Box((at, 0), (length, 2)), Box((local, 0), (length, 2)), copy)


class TestPieces(PatternContract):
    """Blocks of rows in an order of their own, and one that both parts hold."""

    cases = (
        (Pieces(((_rows(4, 2, 0), _rows(0, 1, 2)), (_rows(1, 3, 0),))), (6, 2), 2),
        (Pieces(((_rows(0, 2, 0), _rows(4, 1, 2)), (_rows(2, 2, 0), _rows(4, 1, 2, copy=1)))), (5, 2), 2),
    )

    def test_it_is_named_by_how_many_there_are(self):
        assert self.cases[0][0].name == "pieces(2+1)"

    def test_a_pair_of_boxes_of_other_sizes_is_refused(self):
        with pytest.raises(ValueError, match=r"got \[0:3\], \[0:2\]"):
            Pieces(((RegionPair(Box((0,), (3,)), Box((0,), (2,))),),))


class TestIndexes(PatternContract):
    """Experts in an order of their own, with replicas on several ranks and on one, and a rank without any."""

    cases = (
        (Indexes(((0, 1), (2, 3))), (4, 2, 3), 2),
        (Indexes(((3, 0), (), (1, 2, 0))), (4, 2), 3),
        (Indexes(((1, 1), (0, 1), (0, 2))), (3,), 3),
    )

    def test_adjacent_slots_are_one_box(self):
        assert [len(Indexes(((0, 1, 2), (2, 1, 0))).regions((3, 2), 2, part)) for part in (0, 1)] == [1, 3]
        assert [pair.copy for pair in Indexes(((1, 1), (0, 1))).regions((2,), 2, 1)] == [0, 2]

    @pytest.mark.parametrize(("held", "shape", "parts"), [(((0,),), (2,), 2), (((2,),), (2,), 1)])
    def test_what_does_not_fit_is_refused(self, held, shape, parts):
        with pytest.raises(ValueError, match=rf"\({len(held[0])}\) .* \[2\] on {parts} "):
            Indexes(held).regions(shape, parts, 0)


class TestChunk(PatternContract):
    cases = tuple((Chunk(dim), shape, parts) for shape in SHAPES for parts in PARTS for dim in range(len(shape)))

    def test_the_last_parts_are_short_or_empty(self):
        assert [Chunk(0).regions((9,), 4, index)[0].global_box.numel for index in range(4)] == [3, 3, 3, 0]


class TestStrided(PatternContract):
    cases = tuple(
        (Strided(dim, factor), shape, parts)
        for shape in SHAPES
        for parts in PARTS
        for dim in range(len(shape))
        for factor in (1, 2, 3)
    )


BUFFERS = [
    (start, share, (numel,), parts)
    for parts in PARTS
    for share in (1, 4, 10)
    for start in (0, 3, 9)
    for numel in (0, 1, 7, 11)
    if start + numel <= parts * share
]
"""Starts and shares of buffers of some parts, and what they have room for."""


class TestPartition(PatternContract):
    cases = tuple((Partition(start, share), shape, parts) for start, share, shape, parts in BUFFERS)

    def test_a_parameter_that_leaves_the_buffer(self):
        with pytest.raises(ValueError, match="2 x 4"):
            Partition(start=3, share=4).regions((6,), 2, 0)


class TestTouched(PatternContract):
    cases = tuple((Touched(start, share), shape, parts) for start, share, shape, parts in BUFFERS)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 5, 8, 9, 24])
def test_torch_cuts_alike(length: int, parts: int) -> None:
    """`torch.chunk`, and `_StridedShard` as a DTensor of torch 2.13 cuts by it."""
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = torch.arange(2 * length).reshape(length, 2)

    def held(pattern: Chunk | Strided, index: int) -> list[list[int]]:
        boxes = [pair.global_box for pair in pattern.regions((length, 2), parts, index)]
        return torch.cat([whole[box.offsets[0] : box.stops[0]] for box in boxes]).tolist()

    chunks = [own.tolist() for own in torch.chunk(whole, parts)]
    assert [held(Chunk(0), index) for index in range(parts)] == chunks + [[]] * (parts - len(chunks))
    for factor in (1, 2, 3):
        own, _ = _StridedShard(0, split_factor=factor)._split_tensor(whole, parts, with_padding=False)
        assert [held(Strided(0, factor), index) for index in range(parts)] == [part.tolist() for part in own]
