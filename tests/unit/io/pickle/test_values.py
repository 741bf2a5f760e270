from __future__ import annotations

import pytest

from ucp.io.pickle.values import GlobalName, Stub, TorchSize


@pytest.mark.parametrize("state", [{"x": 1}, (None, {"x": 1}), ({"y": 2}, {"x": 1})])
def test_an_attribute_is_found_wherever_the_state_keeps_it(state):
    stub = Stub(GlobalName("a", "B"), state=state, has_state=True)
    assert stub.attribute("x") == 1
    assert stub.attribute("z", "none") == "none"


@pytest.mark.parametrize("state", [None, 3, (), [{"x": 1}]])
def test_a_state_without_attributes_has_none(state):
    assert Stub(GlobalName("a", "B"), state=state).attribute("x") is None


def test_stubs_are_told_apart():
    assert Stub(GlobalName("a", "B")) != Stub(GlobalName("a", "B"))
    assert str(GlobalName("a.b", "C")) == "a.b.C"
    assert TorchSize((1,)) == (1,)
