"""The optimizer of a torchtitan run that trains queries, keys and values as one parameter, and saves them apart."""

from __future__ import annotations

import pytest
from ucp_formats.torch.state_dict.entries import StateEntry
from ucp_formats.torch.state_dict.sort import sort_entries

from ucp.errors import MalformedError

MODULE = "layers.0.attention.qkv_linear"
MODEL = [StateEntry((f"{MODULE}.{own}.weight",), (4, 8)) for own in ("wq", "wk", "wv")]
NORM = StateEntry(("norm.weight",), (8,))


def optimizer(name: str) -> list[StateEntry]:
    state = [
        StateEntry(("optimizer", f"state.{name}.exp_avg"), (12, 8)),
        StateEntry(("optimizer", f"state.{name}.step"), ()),
    ]
    return [*state, StateEntry(("optimizer", f"param_groups.{name}.lr"), None, 0.5)]


def test_states_of_a_fused_parameter_are_lost_and_its_group_is_kept() -> None:
    parts = sort_entries([*MODEL, NORM, *optimizer(f"{MODULE}.wqkv.weight"), *optimizer("norm.weight")], "somewhere")
    names = {leaf.path[0] for leaf in MODEL}
    assert set(parts.lost) == names
    assert all("fuse_qkv = False" in loss.reason for loss in parts.lost.values())
    assert parts.states.keys() == {"norm.weight"}
    (group,) = parts.groups
    assert (set(group.params), group.hyper) == ({*names, "norm.weight"}, {"lr": 0.5})


@pytest.mark.parametrize("count", [0, 2])
def test_a_stray_that_is_no_fused_parameter_is_refused(count: int) -> None:
    leaves = [*MODEL[:count], NORM, *optimizer(f"{MODULE}.wqkv.weight"), *optimizer("norm.weight")]
    with pytest.raises(MalformedError, match=r"3 entries .*\n  state\..*wqkv\.weight\.exp_avg\n"):
        sort_entries(leaves, "somewhere")
