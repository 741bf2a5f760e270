"""Who holds the same: more ranks than a word has bits, slices held twice, ranks that hold nothing."""

from dataclasses import replace

from tests.unit.live.threads import run
from ucp.core.region import Box, RegionPair
from ucp.core.target import Slice
from ucp.core.tensor import DType
from ucp.live.exchange.stages import find_holders, hash_slices

COUNT = 70


def row(param: str, first: int, rows: int = 1) -> Slice:
    pair = RegionPair(Box((first, 0), (rows, 4)), Box((0, 0), (rows, 4)))
    shape = (rows, 4)
    return Slice(
        param=param, state="weight", dtype=DType.FLOAT32, pairs=(pair,), local_shape=shape, start=0, stop=rows * 4
    )


def test_each_slice_has_its_own_holders():
    def found(ranks):
        own = [row("whole", 0, 8), row("cut", ranks.rank % 35), row("own", ranks.rank)] if ranks.rank else []
        sets, numbers = find_holders(hash_slices(own), ranks)
        return [sets[number] for number in numbers]

    every = tuple(range(1, COUNT))
    none, *rest = run(COUNT, found)
    assert none == []
    for rank, sets in enumerate(rest, 1):
        alike = tuple(r for r in range(1, COUNT) if r % 35 == rank % 35)
        assert sets == [every, alike, (rank,)]


def test_everything_that_makes_a_slice_makes_its_digest():
    own = row("w", 0, 2)
    others = [
        replace(own, param="v"),
        replace(own, state="exp_avg"),
        replace(own, dtype=DType.BFLOAT16),
        replace(own, start=1),
        replace(own, stop=7),
        row("w", 1, 2),
    ]
    assert len(set(hash_slices([own, *others]))) == 1 + len(others)
    assert hash_slices([own]) == hash_slices([row("w", 0, 2)])


def test_what_a_rank_holds_twice_is_shared_as_often_as_others_hold_it():
    def found(ranks):
        sets, numbers = find_holders(hash_slices([row("w", 0)] * (1 + ranks.rank)), ranks)
        return [sets[number] for number in numbers]

    assert run(3, found) == [[(0, 1, 2)], [(0, 1, 2), (1, 2)], [(0, 1, 2), (1, 2), (2,)]]
