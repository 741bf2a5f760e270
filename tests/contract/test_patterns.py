from __future__ import annotations

from ucp_patterns.partial import Partial
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard
from ucp_patterns.unique import Unique

from ucp.layout import Overlap
from ucp.testing import PatternContract

SHAPES = [(), (0,), (1,), (7,), (8, 3), (0, 4), (3, 0), (2, 3, 5)]
PARTS = [1, 2, 3, 8]


class TestUnique(PatternContract):
    cases = tuple((Unique(owner), shape, parts) for shape in SHAPES for parts in PARTS for owner in {0, parts - 1})


class TestReplicate(PatternContract):
    cases = tuple((Replicate(), shape, parts) for shape in SHAPES for parts in PARTS)

    def test_copies_are_equal(self):
        assert Replicate().overlap is Overlap.EQUAL


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
