"""The common state, and lists in it."""

import pytest
from ucp_formats.megatron.torch_dist.objects import list_optimizers, to_list

from ucp.errors import MalformedError


def test_lists_that_became_dicts():
    assert to_list([1, 2], "x") == [1, 2]
    assert to_list({1: "b", 0: "a"}, "x") == ["a", "b"]
    assert to_list({"1": "b", "0": "a"}, "x") == ["a", "b"]
    assert to_list({}, "x") == []


@pytest.mark.parametrize("value", [{0: 1, 2: 3}, "text", {"a": 1}, 3])
def test_other_values_are_no_lists(value):
    with pytest.raises(MalformedError, match=r" list .*groups; got "):
        to_list(value, "groups")


def test_one_optimizer_or_several():
    one = {"optimizer": {"param_groups": []}}
    assert list_optimizers({}) == {}
    assert list_optimizers({"optimizer": one}) == {None: one}
    assert list_optimizers({"optimizer": {0: one, 1: {}}}) == {0: one, 1: {}}
    assert list_optimizers({"optimizer": {"1": {}, "0": one}}) == {0: one, 1: {}}
    assert list_optimizers({"optimizer": [one, {}]}) == {0: one, 1: {}}
    assert list_optimizers({"optimizer": 3}) == {}
