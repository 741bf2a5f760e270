"""Extras that a target cannot write: each under one reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ucp.contract.run_extras import ExtraRow, ExtraValues
from ucp.core.index import Extra, Index
from ucp.testing.handmade import Shards, make_index

TABLE = {"scaler": ExtraRow(rank_stage=1), "client/": ExtraRow(rank_stage=3)}


@pytest.fixture
def index(tmp_path: Path) -> Index:
    names = ("scaler", "client/a", "rng_state")
    extras = tuple(Extra(name=name, value=rank, rank=rank) for name in names for rank in range(2))
    index = make_index(tmp_path, {("a", "weight"): Shards(tmp_path).whole(np.zeros(2))})
    return replace(index, extras=extras)


def test_an_extra_without_a_place_is_not_also_one_whose_rank_0_is_kept(index: Index) -> None:
    extras = ExtraValues(index, TABLE)
    assert (extras.without_place(), extras.without_rank(1)) == (["rng_state"], ["client/a"])
    assert ExtraValues(index, TABLE, same_ranks=False).without_rank(3) == ["client/a", "scaler"]
