"""Checksums of records of which every rank reads another part."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.live.threads import run
from ucp.core.region import Box, RegionPair
from ucp.core.target import Slice
from ucp.core.tensor import DType
from ucp.live.exchange.carry import CarryOptions, carry
from ucp.live.exchange.stages import Exchange
from ucp.live.parts import LoadItem
from ucp.testing.handmade import Shards

COUNT, ROWS, COLUMNS = 3, 9, 5


@pytest.fixture
def stored(tmp_path):
    """Two tensors and their records, in a file each."""
    shards = Shards(tmp_path)
    states = {name: shards.whole(np.ones((ROWS, COLUMNS), np.float32), file=name) for name in ("a", "b")}
    return states, [shards.record(state.fragments[0].ref) for state in states.values()]


def loaded(stored, exchange):
    """Each rank holds a third of the rows of both."""
    states, records = stored

    def work(ranks):
        third = (ROWS // COUNT, COLUMNS)
        pair = RegionPair(Box((ranks.rank * third[0], 0), third), Box.full(third))
        items, into = [], []
        for name, state in states.items():
            own = Slice(
                param=name,
                state="weight",
                dtype=DType.FLOAT32,
                pairs=(pair,),
                local_shape=third,
                start=0,
                stop=third[0] * third[1],
            )
            items.append(LoadItem(name=name, slice=own, source=state))
            into.append(torch.zeros(third))
        return carry(items, into, ranks, CarryOptions(exchange=exchange, records=records))

    return run(COUNT, work)


@pytest.mark.parametrize("exchange", list(Exchange))
def test_what_ranks_read_between_them_is_checked(stored, exchange):
    for traffic in loaded(stored, exchange):
        assert {Path(path).name for path in traffic.checked} == {"a", "b"}
        assert sum(traffic.nbytes) == 2 * ROWS * COLUMNS * 4


def test_a_part_that_no_rank_holds_is_read_for_the_checksum(stored):
    states, records = stored
    longer = np.zeros((ROWS + 1, COLUMNS), np.float32)
    tail = Shards(Path(records[0].path).parent).put(longer, file="a")
    record = Shards(Path(records[0].path).parent).record(replace(states["a"].fragments[0].ref, shape=tail.shape))
    for traffic in loaded((states, [record, records[1]]), Exchange.NEVER):
        assert sum(traffic.nbytes) == (2 * ROWS + 1) * COLUMNS * 4
        assert {Path(path).name for path in traffic.checked} == {"a", "b"}
