"""Laws of rules: whatever family, sizes and degrees, what a rule takes apart it puts together again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from ucp_patterns.chunk import Chunk

from tests.strategies import coordinates
from ucp.contract.registry import families, family, library
from ucp.core.layout import AxisLayout, Layout, compute_local_shape, infer_global_shape, place
from ucp.core.region import find_gaps
from ucp.families.expression import Expression
from ucp.families.family import Family
from ucp.families.match import Match
from ucp.families.rule import Rule
from ucp.families.toml.family import read_family

NUMBERS = {"layer": 3, "expert": 2, "mtp": 1}

OWN = """
name = "fused"
title = "What models outside of Megatron do: several axes on one tensor, blocks of unequal sizes, copies of blocks"

[sizes]
heads = "heads"
groups = "groups"
head_dim = "head_dim"
experts = "experts"
out = "out"

# The paper's Shard-Hy: experts over ep, and the rows of each expert over tp.
[[rule]]
name = "layers.{layer}.experts.weight"
ep = { pattern = "shard", dim = 0, blocks = ["out * experts"] }
tp = { pattern = "shard", dim = 0, blocks = ["out"], repeat = "experts / ep" }

# The same with columns: two axes on two dims.
[[rule]]
name = "layers.{layer}.experts.out.weight"
ep = { pattern = "shard", dim = 0 }
tp = { pattern = "shard", dim = 1 }

# [q + k + v, hidden] of unequal sizes; fewer key and value heads than ranks are held by several.
[[rule]]
name = "layers.{layer}.qkv.weight"
[rule.tp]
pattern = "shard"
dim = 0
blocks = ["heads * head_dim", "groups * head_dim", "groups * head_dim"]
copies = [1, "max(tp / groups, 1) if tp > groups else 1", "max(tp / groups, 1) if tp > groups else 1"]
"""


def own_family() -> Family:
    made = library()
    return read_family(OWN, "own.toml", pattern=made.pattern)


ALL: list[tuple[Family, Rule]] = [(own, rule) for own in map(family, families()) for rule in own.rules]
NAMES = sorted({name for own, _ in ALL for name in own.sizes} | {name for own, _ in ALL for name in own.constants})


@dataclass(frozen=True)
class Case:
    match: Match
    axes: dict[str, int]
    shape: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        return self.match.layout(axes=self.axes, global_shape=self.shape)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A rule of a built-in family, sizes that it holds for, degrees, and a shape that its blocks add up to."""
    own, rule = draw(st.sampled_from(ALL))
    values = {name: draw(st.integers(1, 6)) for name in NAMES} | dict(own.constants)
    for flag in ("gated", "mla", "down_cut", "tied"):
        values.setdefault(flag, 1)
        values[flag] = own.constants.get(flag, draw(st.integers(0, 1)))
    assume(rule.when is None or rule.when.value(values))
    axes = {axis: draw(st.integers(1, 6)) for axis in ("tp", "etp")}
    shape = draw(st.lists(st.integers(0, 5), min_size=2, max_size=3).map(tuple))
    for axis in rule.axes:
        shape = (*shape[: axis.dim], cut_length(draw, axis.options.get("blocks"), values), *shape[axis.dim + 1 :])
    match = Match(name=rule.name.filled(NUMBERS), rules=(rule,), fields=NUMBERS, values=values)
    return Case(match, axes, shape)


def cut_length(draw: st.DrawFn, blocks: object, values: dict[str, int]) -> int:
    """Elements of a dim that such blocks can make up."""
    if not isinstance(blocks, tuple):
        return draw(st.integers(0, 12))
    if any(isinstance(own, Expression) and "dim" in own.names for own in blocks):
        return draw(st.integers(0, 6)) * len(blocks)
    return sum(own.value(values) if isinstance(own, Expression) else own for own in blocks)


def taken_apart(layout: Layout, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [compute_local_shape(layout, shape, rank) for rank in coordinates(layout)]


@given(cases(), st.integers(1, 5))
def test_a_flat_partition_of_every_part_makes_up_the_whole(case, dp):
    """As a distributed optimizer cuts what each rank holds, whether it divides or not."""
    layout, shape = replace(case.layout, flat=(AxisLayout("dp", dp, Chunk(0)),)), case.shape
    placed = (own for rank in layout.ranks() for own in place(layout, shape, coords=rank))
    boxes = [own.box for own in placed if own.replica == own.term == 0]
    assert find_gaps(shape, boxes) == ()


@given(cases())
def test_whole_shape_inverts(case):
    assert infer_global_shape(case.layout, taken_apart(case.layout, case.shape)) == case.shape


@given(cases())
def test_the_parts_tell_the_layout_that_the_whole_tells(case):
    parts = taken_apart(case.layout, case.shape)
    assert case.match.layout(axes=case.axes, local_shapes=parts) == case.layout


class TestFused:
    """Several axes on one dim, and copies of blocks, against numpy."""

    @given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6))
    def test_experts_over_ep_and_their_rows_over_tp(self, experts_each, ep, tp, out):
        experts = experts_each * ep
        shape = (experts * out, 2)
        own = own_family().bind(arguments={"experts": experts, "out": out}, axes={"ep": ep})
        (match,) = own.match(["layers.0.experts.weight"]).values()
        layout = match.layout(axes={"ep": ep, "tp": tp}, global_shape=shape)
        whole = np.arange(prod(shape)).reshape(shape)
        for rank in coordinates(layout):
            mine = np.split(whole, ep)[rank["ep"]].reshape(experts_each, out, 2)
            wanted = np.array_split(mine, tp, axis=1)[rank["tp"]].reshape(-1, 2)
            assert held(layout, whole, rank).tolist() == wanted.reshape(-1).tolist()
        assert match.layout(axes={"ep": ep, "tp": tp}, local_shapes=taken_apart(layout, shape)) == layout

    @given(st.sampled_from([(8, 1), (8, 2), (8, 4), (8, 8), (4, 2)]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
    def test_fewer_key_and_value_heads_than_ranks(self, model, tp, width):
        heads, groups = model
        assume(heads % tp == 0)
        own = own_family().bind(arguments={"heads": heads, "groups": groups, "head_dim": width})
        (match,) = own.match(["layers.0.qkv.weight"]).values()
        whole = np.arange((heads + 2 * groups) * width * 2).reshape(-1, 2)
        layout = match.layout(axes={"tp": tp}, global_shape=whole.shape)
        q, k, v = np.split(whole, np.cumsum([heads * width, groups * width]))
        copies = max(tp // groups, 1)
        for rank in coordinates(layout):
            kv = [np.split(own, tp // copies)[rank["tp"] // copies] for own in (k, v)]
            wanted = np.concatenate([np.split(q, tp)[rank["tp"]], *kv])
            assert held(layout, whole, rank).tolist() == wanted.reshape(-1).tolist()
        parts = taken_apart(layout, whole.shape)
        assert match.layout(axes={"tp": tp}, local_shapes=parts) == layout
        assert match.global_shape(layout, parts) == whole.shape


def held(layout: Layout, whole: np.ndarray, rank: dict[str, int]) -> np.ndarray:
    stored = np.full(prod(compute_local_shape(layout, whole.shape, rank)), -1)
    for own in place(layout, whole.shape, coords=rank):
        for at in np.ndindex(*own.box.sizes):
            stored[own.offset + sum(i * s for i, s in zip(at, own.strides, strict=True))] = whole[
                tuple(o + i for o, i in zip(own.box.offsets, at, strict=True))
            ]
    return stored
