from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.errors import UsageError
from ucp.topology import AXES, Topology

TOPOLOGIES = st.builds(Topology, **{axis: st.integers(1, 64) for axis in AXES}, zero=st.none() | st.integers(0, 3))


@given(TOPOLOGIES)
def test_parsing_undoes_printing(topology):
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("dp=4", Topology(dp=4)),
        (" dp = 4 , zero=0 ,", Topology(dp=4, zero=0)),
        ("zero=3,tp=2,pp=2,ep=2,cp=2", Topology(tp=2, pp=2, ep=2, cp=2, zero=3)),
    ],
)
def test_pairs_in_any_order(text, wanted):
    assert Topology.parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "such as dp=4,zero=3"),
        (" , ", "such as dp=4,zero=3"),
        ("dp", "expected axis=degree"),
        ("dp=", "expected axis=degree"),
        ("dp=two", "expected axis=degree"),
        ("dp=-1", "expected axis=degree"),
        ("dp=٣", "expected axis=degree"),
        ("dp=1.5", "expected axis=degree"),
        ("mp=2", "one of dp, tp, pp, ep, cp, zero"),
        ("dp=2,dp=4", "given twice"),
        ("dp=0", ">= 1 for dp"),
        ("zero=4", "ZeRO stage"),
    ],
)
def test_what_means_nothing_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        Topology.parse(text)


@pytest.mark.parametrize("degrees", [{"dp": 0}, {"tp": True}, {"pp": 2.0}, {"zero": -1}, {"zero": 4}])
def test_an_invalid_topology_cannot_exist(degrees):
    with pytest.raises(UsageError):
        Topology(**degrees)
