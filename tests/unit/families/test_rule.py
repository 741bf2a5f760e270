from __future__ import annotations

import numpy as np
import pytest
from ucp_patterns.shard import Shard

from ucp.families.expression import Expression
from ucp.families.rule import Alias, AxisRule


def joined(alias: Alias, stored: list[np.ndarray], values: dict[str, int]) -> np.ndarray:
    """The whole, by the meaning of `elements` and `pieces`."""
    seen = []
    for own in stored:
        shape, strides = alias.elements(own.shape, values)
        flat = np.ascontiguousarray(own).reshape(-1)
        seen.append(np.lib.stride_tricks.as_strided(flat, shape, [step * flat.itemsize for step in strides]))
    pairs = alias.locate_parts([own.shape for own in seen], values)
    whole = np.full([max(stops) for stops in zip(*(pair.global_box.stops for pair in pairs), strict=True)], -1)
    for pair in pairs:
        source = tuple(slice(o, o + n) for o, n in zip(pair.local.offsets, pair.local.sizes, strict=True))
        target = tuple(slice(o, o + n) for o, n in zip(pair.global_box.offsets, pair.global_box.sizes, strict=True))
        assert (whole[target] == -1).all()
        whole[target] = seen[pair.tensor][source]
    return whole


def numbers(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape)


def test_one_tensor_is_itself():
    assert (joined(Alias(names=("w",)), [numbers(3, 4)], {}) == numbers(3, 4)).all()


def test_gate_and_up_are_concatenated():
    gate, up = numbers(3, 2), numbers(3, 2, start=50)
    assert (joined(Alias(names=("gate", "up")), [gate, up], {}) == np.concatenate([gate, up])).all()


def test_queries_keys_and_values_join_by_group():
    """As megatron-core reads linear_qkv: view(groups, queries + 2, head_dim, hidden)."""
    heads, groups, width, hidden = 6, 3, 2, 5
    q, k, v = numbers(heads * width, hidden), numbers(groups * width, hidden), numbers(groups * width, hidden)
    k, v = k + 100, v + 200
    alias = Alias(names=("q", "k", "v"), groups=Expression("groups"))
    whole = joined(alias, [q, k, v], {"groups": groups}).reshape(groups, heads // groups + 2, width, hidden)
    assert (whole[:, :-2].reshape(heads * width, hidden) == q).all()
    assert (whole[:, -2].reshape(groups * width, hidden) == k).all()
    assert (whole[:, -1].reshape(groups * width, hidden) == v).all()


def test_a_transposed_fused_tensor_is_taken_apart():
    """GPT-2: [hidden, 3 * hidden] with all queries first."""
    heads, width = 2, 3
    hidden = heads * width
    stored = numbers(hidden, 3 * hidden)
    alias = Alias(
        names=("c_attn",), order=(1, 0), blocks=(hidden, Expression("hidden"), hidden), groups=Expression("heads")
    )
    whole = joined(alias, [stored], {"hidden": hidden, "heads": heads})
    wanted = stored.T.reshape(3, heads, width, hidden).swapaxes(0, 1).reshape(3 * hidden, hidden)
    assert (whole == wanted).all()


def test_grouped_experts_are_looked_at_as_their_memory_is():
    """GroupedMLP: weight1.view(experts, hidden, -1), transposed."""
    experts, hidden, out = 3, 4, 5
    stored = numbers(hidden, experts * out)
    alias = Alias(names=("weight1",), view=(Expression("experts / ep"), Expression("hidden"), -1), order=(0, 2, 1))
    shape, strides = alias.elements(stored.shape, {"experts": 6, "ep": 2, "hidden": hidden})
    assert shape == (experts, out, hidden)
    seen = np.lib.stride_tricks.as_strided(stored, shape, [step * stored.itemsize for step in strides])
    assert (seen == stored.reshape(experts, hidden, out).transpose(0, 2, 1)).all()


@pytest.mark.parametrize(
    ("alias", "shapes", "facts"),
    [
        (Alias(names=("q", "k"), groups=Expression("4")), [(8,), (6,)], r"4 groups .*\[8, 6\] of q, k"),
        (Alias(names=("q", "k")), [(8,)], "q, k; got 1"),
        (Alias(names=("qkv",), blocks=(3, 3)), [(8,)], "6 long, not 8"),
        (Alias(names=("q",), groups=Expression("0")), [(8,)], "0 groups"),
    ],
)
def test_what_does_not_join_says_so(alias, shapes, facts):
    with pytest.raises(ValueError, match=facts):
        alias.locate_parts(shapes, {})


def test_a_view_of_other_elements_is_refused():
    with pytest.raises(ValueError, match=r"w of shape \[4, 4\] .* \[3, 5\]"):
        Alias(names=("w",), view=(3, -1)).elements((4, 4), {})


def test_a_pattern_is_made_when_sizes_are_known():
    rule = AxisRule(
        axis="tp",
        pattern="shard",
        factory=Shard,
        options={"dim": 1, "blocks": (Expression("dim / 2"), Expression("k"))},
    )
    assert rule.make_pattern({"dim": 8, "k": 4}) == Shard(1, (4, 4))
    assert (rule.dim, rule.needs_length) == (1, True)
    assert str(rule) == "tp: shard(dim=1, blocks=[dim / 2, k])"
    assert str(AxisRule(axis="tp", pattern="replicate", factory=Shard)) == "tp: replicate"
