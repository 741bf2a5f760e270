"""The optimizer of a torchtitan run that trains queries, keys and values as one parameter, and saves them apart."""

from __future__ import annotations

import pytest
from ucp_formats.torch.state_dict import Leaf, sorted_out

from ucp.errors import MalformedError

MODULE = "layers.0.attention.qkv_linear"
MODEL = [Leaf((f"{MODULE}.{own}.weight",), (4, 8)) for own in ("wq", "wk", "wv")]
NORM = Leaf(("norm.weight",), (8,))


def optimizer(name: str) -> list[Leaf]:
    state = [Leaf(("optimizer", f"state.{name}.exp_avg"), (12, 8)), Leaf(("optimizer", f"state.{name}.step"), ())]
    return [*state, Leaf(("optimizer", f"param_groups.{name}.lr"), None, 0.5)]


def test_states_of_a_fused_parameter_are_lost_and_its_group_is_kept() -> None:
    parts = sorted_out([*MODEL, NORM, *optimizer(f"{MODULE}.wqkv.weight"), *optimizer("norm.weight")], "somewhere")
    names = {leaf.path[0] for leaf in MODEL}
    assert set(parts.lost) == names
    assert all("fuse_qkv = False" in loss.reason for loss in parts.lost.values())
    assert parts.states.keys() == {"norm.weight"}
    (group,) = parts.groups
    assert (set(group.params), group.hyper) == ({*names, "norm.weight"}, {"lr": 0.5})


@pytest.mark.parametrize("count", [0, 2])
def test_a_stray_that_is_no_fused_parameter_is_refused(count: int) -> None:
    leaves = [*MODEL[:count], NORM, *optimizer(f"{MODULE}.wqkv.weight"), *optimizer("norm.weight")]
    with pytest.raises(MalformedError, match="3 entries of no parameter of the model"):
        sorted_out(leaves, "somewhere")
