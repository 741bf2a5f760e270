"""Parameters without an optimizer group are refused, with what the source says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ucp_formats.deepspeed.write.optimizer.groups import optimizer_groups
from ucp_formats.deepspeed.write.run import run_facts

from ucp.core.index import LostStates, ParamGroup
from ucp.core.target import TargetOptions
from ucp.errors import MissingStateError
from ucp.testing.handmade import Shards, make_index


def groups_of(index):
    return optimizer_groups(run_facts(index, TargetOptions(), ranks=1, stage=1, tp=1))


@pytest.fixture
def index(tmp_path):
    shards = Shards(tmp_path)
    states = {(name, state): shards.whole(np.zeros(2, np.float32)) for name in "ab" for state in ("weight", "exp_avg")}
    return make_index(tmp_path, states, groups=(ParamGroup(params=("a",), hyper={"lr": 0.1}),))


def test_by_name(index):
    with pytest.raises(MissingStateError, match=r"has 1 in none:\n  b\nconvert from a checkpoint with the whole"):
        groups_of(index)


def test_with_the_reason_that_the_source_gives(index):
    told = replace(
        index, lost={"b": LostStates(reason="the optimizer group of 1 parameter, which is not recorded", detail="[2]")}
    )
    with pytest.raises(MissingStateError) as error:
        groups_of(told)
    assert str(error.value).endswith(
        "has 1 in none:\nthe optimizer group of 1 parameter, which is not recorded:\n  b: [2]\n"
        "convert from a checkpoint with the whole optimizer"
    )
