"""What is common to all ranks in DeepSpeed's flat tensors; see `test_deepspeed_layout.py`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from ucp_formats.deepspeed.partition import alignment_paddings, chunk, shared_buffers, sub_groups

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(
    lambda numels: [(f"p{number}", numel) for number, numel in enumerate(numels)]
)
RANKS = st.integers(1, 9)


@given(SIZES, st.sampled_from([2, 4]))
def test_aligned_parameters_start_at_multiples_of_16_bytes(sizes: list[tuple[str, int]], itemsize: int) -> None:
    paddings = alignment_paddings([numel for _, numel in sizes], itemsize=itemsize)
    buffer, *_ = shared_buffers(dict(sizes), ranks=2, paddings=paddings, first=0, known_from="")
    assert all(start * itemsize % 16 == 0 for start in buffer.starts)
    assert paddings[-1] == 0


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
