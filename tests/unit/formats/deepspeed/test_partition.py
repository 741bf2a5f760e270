"""The arithmetic of DeepSpeed's partitions, against a model that copies elements one by one."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from ucp_formats.deepspeed.partition import (
    FlatGroup,
    alignment_paddings,
    chunk,
    chunk_range,
    chunked,
    flat_group,
    round_robin,
    sub_groups,
)

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(
    lambda numels: [(f"p{number}", numel) for number, numel in enumerate(numels)]
)
RANKS = st.integers(1, 9)


def elements(group: FlatGroup, rank: int) -> dict[int, tuple[str, int]]:
    return {
        held.offset + step: (held.name, held.start + step)
        for held in group.held(rank)
        for step in range(held.stop - held.start)
    }


@given(SIZES, RANKS, st.booleans())
def test_shares_of_all_ranks_are_the_padded_buffer_cut_evenly(
    sizes: list[tuple[str, int]], ranks: int, aligned: bool
) -> None:
    paddings = alignment_paddings([numel for _, numel in sizes], itemsize=2) if aligned else [0] * len(sizes)
    buffer: list[tuple[str, int] | None] = []
    for (name, numel), padding in zip(sizes, paddings, strict=True):
        buffer += [(name, element) for element in range(numel)] + [None] * padding
    used = len(buffer)
    buffer += [None] * (-used % (2 * ranks))
    group = flat_group(sizes, ranks=ranks, paddings=paddings)
    assert group.used == used
    assert group.partition * ranks == len(buffer)
    for rank in range(ranks):
        share = buffer[rank * group.partition : (rank + 1) * group.partition]
        assert elements(group, rank) == {at: held for at, held in enumerate(share) if held is not None}
        tail = max(0, min(group.partition, (rank + 1) * group.partition - used))
        assert group.padding(rank) == tail


@given(SIZES, st.sampled_from([2, 4]))
def test_aligned_parameters_start_at_multiples_of_16_bytes(sizes: list[tuple[str, int]], itemsize: int) -> None:
    paddings = alignment_paddings([numel for _, numel in sizes], itemsize=itemsize)
    group = flat_group(sizes, ranks=2, paddings=paddings)
    assert all(offset * itemsize % 16 == 0 for offset in group.offsets)
    assert paddings[-1] == 0


@given(SIZES, RANKS)
def test_chunks_of_all_ranks_are_every_element_once(sizes: list[tuple[str, int]], ranks: int) -> None:
    for _, numel in sizes:
        spans = [chunk_range(numel, ranks=ranks, rank=rank) for rank in range(ranks)]
        assert [element for start, stop in spans for element in range(start, stop)] == list(range(numel))
        assert chunk(numel, ranks=ranks) == math.ceil(numel / ranks)


@given(SIZES, RANKS)
def test_chunks_stand_at_running_offsets_padding_counted(sizes: list[tuple[str, int]], ranks: int) -> None:
    offsets = {name: sum(chunk(n, ranks=ranks) for _, n in sizes[:at]) for at, (name, _) in enumerate(sizes)}
    for rank in range(ranks):
        for held in chunked(sizes, ranks=ranks, rank=rank):
            assert held.offset == offsets[held.name]
            assert held.start == rank * chunk(dict(sizes)[held.name], ranks=ranks)


@given(SIZES, RANKS, st.integers(0, 60))
def test_sub_groups_keep_all_parameters_in_order_and_close_at_the_limit(
    sizes: list[tuple[str, int]], ranks: int, limit: int
) -> None:
    groups = sub_groups(sizes, ranks=ranks, limit=limit)
    assert [name for names in groups for name in names] == [name for name, _ in sizes]
    weight = {name: chunk(numel, ranks=ranks) for name, numel in sizes}
    for names in groups[:-1]:
        assert sum(weight[name] for name in names) >= limit
        assert sum(weight[name] for name in names[:-1]) < limit or len(names) == 1


@given(SIZES, RANKS)
def test_round_robin_is_a_permutation_dealt_by_rank(sizes: list[tuple[str, int]], ranks: int) -> None:
    names = [name for name, _ in sizes]
    dealt = round_robin(names, ranks=ranks)
    assert sorted(dealt) == sorted(names)
    hands = [[name for position, name in enumerate(names) if position % ranks == rank] for rank in range(ranks)]
    assert list(dealt) == [name for hand in hands for name in hand]
