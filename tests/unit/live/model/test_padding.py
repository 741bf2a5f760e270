"""A vocabulary that the run pads otherwise than the checkpoint: which rows a rank takes."""

from __future__ import annotations

import pytest
from ucp_patterns.partition import Partition
from ucp_patterns.shard import Shard

from ucp.core.layout import AxisLayout, Layout
from ucp.core.tensor import DType
from ucp.live.parts import LivePart

RANKS = 3
ROWS, WIDTH = 12, 2


def part(tp: int, *, dp: int | None = None, padded: bool = True) -> LivePart:
    """Four rows of twelve; `dp`: of its elements, the half that a rank of two steps."""
    flat = () if dp is None else (AxisLayout("dp", 2, Partition(start=0, share=4)),)
    return LivePart(
        local_shape=(4, WIDTH),
        layout=Layout((AxisLayout("tp", RANKS, Shard(0)),), flat),
        coords={"tp": tp, "dp": dp or 0},
        global_shape=(ROWS, WIDTH),
        is_padded=padded,
    )


@pytest.mark.parametrize("stored", [1, 4, 7, 8, 11, 12, 15])
def test_the_ranks_take_every_row_that_both_have_once(stored: int) -> None:
    taken = [
        row
        for tp in range(RANKS)
        for pair in part(tp).to_slice("w", "weight", (stored, WIDTH), DType.FLOAT32).pairs
        for row in range(pair.global_box.offsets[0], pair.global_box.stops[0])
    ]
    assert taken == list(range(min(stored, ROWS)))


@pytest.mark.parametrize("stored", [5, 6, 7, 8])
def test_stretches_of_a_rank_end_where_its_rows_do(stored: int) -> None:
    slices = [part(1, dp=dp).to_slice("w", "exp_avg", (stored, WIDTH), DType.FLOAT32) for dp in range(2)]
    kept = (stored - 4) * WIDTH
    assert [(own.start, own.stop) for own in slices] == [(0, min(kept, 4)), (min(4, kept), kept)]
