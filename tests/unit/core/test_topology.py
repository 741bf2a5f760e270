from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.core.topology import AXES, Topology
from ucp.errors import TopologyError

DEGREES = st.integers(1, 64)
TOPOLOGIES = (
    st.builds(
        Topology,
        **dict.fromkeys(AXES, DEGREES),
        zero=st.none() | st.integers(0, 3),
        etp=st.none() | DEGREES,
    )
    | st.builds(Topology, pp=st.integers(2, 64), vpp=DEGREES)
    | st.builds(Topology, dp_replicate=DEGREES, dp_shard=DEGREES)
)


@given(TOPOLOGIES)
def test_parsing_undoes_printing(topology):
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("dp=4", Topology(dp=4)),
        (" dp = 4 , zero=0 ,", Topology(dp=4, zero=0)),
        ("zero=3,tp=2,pp=2,ep=2,cp=2", Topology(tp=2, pp=2, ep=2, cp=2, zero=3)),
        ("pp=2,vpp=3", Topology(pp=2, vpp=3)),
        ("tp=4,ep=2,etp=1", Topology(tp=4, ep=2, etp=1)),
        ("dp_replicate=2,dp_shard=4,tp=2", Topology(dp=8, dp_replicate=2, dp_shard=4, tp=2)),
        ("dp=8,dp_shard=4", Topology(dp=8, dp_replicate=2, dp_shard=4)),
        ("dp_replicate=2", Topology(dp=2, dp_replicate=2, dp_shard=1)),
    ],
)
def test_pairs_in_any_order(text, wanted):
    assert Topology.parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", "dp=4,zero=3; got ''$"),
        (" , ", "dp=4,zero=3; got ' , '$"),
        ("dp", "got 'dp' in"),
        ("dp=", "got 'dp=' in"),
        ("dp=two", "got 'dp=two' in"),
        ("dp=-1", "got 'dp=-1' in"),
        ("dp=٣", "got 'dp=٣' in"),
        ("dp=1.5", "got 'dp=1.5' in"),
        ("mp=2", "dp, tp, pp, ep, cp, zero, vpp, etp.*; got 'mp=2' in"),
        ("dp=2,dp=4", "^dp .*'dp=2,dp=4'"),
        ("dp=0", ">= 1 for dp; got 0"),
        ("zero=4", "got zero=4"),
        ("etp=0", ">= 1 for etp; got 0"),
        ("vpp=2", "got vpp=2, pp=1"),
        ("dp=4,dp_replicate=2,dp_shard=4", "got dp=4 and 2 x 4"),
        ("dp=4,dp_replicate=3", "got dp=4 and 3 x "),
        ("dp_shard=0", ">= 1 for dp_shard; got 0"),
    ],
)
def test_what_means_nothing_is_refused(text, facts):
    with pytest.raises(TopologyError, match=facts):
        Topology.parse(text)


@pytest.mark.parametrize(
    "degrees", [{"dp": 0}, {"tp": True}, {"pp": 2.0}, {"zero": -1}, {"zero": 4}, {"vpp": None}, {"etp": 1.5}]
)
def test_an_invalid_topology_cannot_exist(degrees):
    ((axis, degree),) = degrees.items()
    with pytest.raises(TopologyError, match=rf"\b{axis}(=|; got ){degree}"):
        Topology(**degrees)


@pytest.mark.parametrize(("etp", "degree"), [(None, 4), (1, 1), (8, 8)])
def test_experts_are_cut_over_tp_unless_said_otherwise(etp, degree):
    assert Topology(tp=4, etp=etp).expert_tp == degree


def test_a_split_of_dp_counts_its_ranks():
    split = Topology(dp_replicate=2, dp_shard=4, tp=2)
    assert (split.dp, split.replicas, split.shards, split.ranks) == (8, 2, 4, 16)
    assert str(split) == "dp_replicate=2,dp_shard=4,tp=2"
    whole = Topology(dp=8)
    assert (whole.is_split, whole.replicas, whole.shards) == (False, 1, 8)
