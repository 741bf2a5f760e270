from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ucp_formats.megatron.names import GridPlace
from ucp_formats.megatron.source import find_grad_scaler
from ucp_formats.megatron.write.arguments import update_arguments
from ucp_formats.megatron.write.model import check_topology, find_grid_problem, select_rng_states

from ucp.core.index import Extra, Index
from ucp.core.topology import Topology
from ucp.errors import TopologyError
from ucp.testing.handmade import Shards, make_index


@pytest.fixture
def index(tmp_path):
    def make(topology: Topology, *extras: Extra) -> Index:
        states = {("w", "weight"): Shards(tmp_path).whole(np.zeros(2, dtype=np.float32))}
        return replace(make_index(tmp_path, states, extras=extras), topology=topology)

    return make


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer/grad_scaler/pp0.tp0.ep0", {"scale": 2.0}),
        ("optimizer/0/grad_scaler/pp0.tp0.ep0", {"scale": 2.0}),
        ("optimizer", {"grad_scaler": {"scale": 2.0}}),
        ("optimizer", {"0": {"grad_scaler": {"scale": 2.0}}, "1": {}}),
    ],
)
def test_the_scaler_is_found_however_it_was_kept(name, value, index):
    assert find_grad_scaler(index(Topology(), Extra(name=name, value=value))) == {"scale": 2.0}


RANDOM = [Extra(name=f"rng_state/pp{pp}.tp{tp}", value=(pp, tp)) for pp in range(2) for tp in range(2)]
PLACES = [GridPlace(tp=tp, pp=pp, ep=0) for pp in range(2) for tp in range(2)]


def test_select_rng_states_of_some_ranks_only(index):
    more = [*PLACES, GridPlace(tp=0, pp=0, ep=1)]
    assert select_rng_states(index(Topology(tp=2, pp=2), *RANDOM), Topology(tp=2, pp=2), more) == {}
    odd = Extra(name="rng_state/0.0.0", value=1)
    assert select_rng_states(index(Topology(), odd), Topology(), [GridPlace(tp=0, pp=0, ep=0)]) == {}


def test_zero_is_of_another_framework():
    with pytest.raises(TopologyError, match="zero=1"):
        check_topology(Topology(dp=2, zero=1))


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (Topology(tp=2, ep=4), "raise dp to a multiple of 4"),
        (Topology(tp=2, ep=4, etp=1), "raise dp to a multiple of 2"),
        (Topology(tp=2, ep=3, dp=2), "etp x ep = 2 x 3 does not divide tp x cp x dp = 2 x 1 x 2"),
    ],
)
def test_grids_that_no_run_has(topology, message):
    assert message in (find_grid_problem(topology) or "")


def relaid(topology: Topology, **arguments: object) -> dict[str, object]:
    return update_arguments(arguments, topology, ckpt_format="torch", iteration=7, has_optimizer=True, has_rng=False)


def test_stages_are_even_again_where_the_pipeline_changes():
    uneven = {"decoder_first_pipeline_num_layers": 3, "pipeline_model_parallel_size": 2}
    assert relaid(Topology(pp=2), **uneven)["decoder_first_pipeline_num_layers"] == 3
    assert relaid(Topology(pp=4), **uneven)["decoder_first_pipeline_num_layers"] is None
