from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from ucp_patterns.partial import Partial
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard

from ucp.checks.propose import Proposed, propose
from ucp.contract.protocols import Format, LocalTensor, LocalTensors
from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Index, Kind, StateIndex
from ucp.core.layout import AxisLayout, Layout, Pattern
from ucp.core.region import Box
from ucp.core.topology import Topology
from ucp.errors import MalformedError
from ucp.testing.handmade import Shards, inline

RNG = np.random.default_rng(1)


def noise(*shape: int, scale: float = 1.0, around: float = 0.0) -> np.ndarray:
    return (around + scale * RNG.standard_normal(shape)).astype("float32")


@pytest.fixture
def recognised(monkeypatch, tmp_path):
    """Makes `propose` see a format that gives what it is told."""

    def use(fmt) -> None:
        monkeypatch.setattr(import_module("ucp.checks.propose"), "recognise", lambda path: (fmt, None))

    return use


class Local:
    """A format of ranks."""

    def __init__(self, tensors, **arguments) -> None:
        self.tensors, self.arguments = tensors, arguments

    def local_tensors(self, path):
        return LocalTensors(arguments=self.arguments, tensors=tuple(self.tensors))


def held(shards: Shards, name: str, arrays, **coords):
    return [
        LocalTensor(name=name, coords={"tp": at, **coords}, ref=shards.put(array)) for at, array in enumerate(arrays)
    ]


def patterns(path, **options) -> dict[str, tuple[str | None, str]]:
    found = propose(path, **options)
    return {own.template: (own.pattern, own.certainty.value) for own in found.proposals}


def test_a_model_of_ranks(recognised, tmp_path):
    shards = Shards(tmp_path)
    norm, copy = noise(16, around=1), noise(16)
    big = noise(300, 60)
    tensors = [
        *held(shards, "blocks.0.norm.weight", [norm, norm]),
        *held(shards, "blocks.0.scale.weight", [noise(40, around=1, scale=0.1) for _ in range(2)]),
        *held(shards, "blocks.0.drift.weight", [copy, copy + noise(16, scale=0.01)]),
        *held(shards, "blocks.0.bias", [np.zeros(8, "float32")] * 2),
        *held(shards, "blocks.0.up.weight", [noise(24, 16), noise(24, 16)]),
        *held(shards, "blocks.0.big.weight", [big, big]),
        *held(shards, "blocks.0.almost.weight", [big, np.where(np.arange(60) == 0, -big, big)]),
        *held(shards, "blocks.0.experts.3.w.weight", [noise(4, 16)], ep=0),
        *held(shards, "blocks.0.experts.3.w.weight", [noise(4, 16)], ep=1),
    ]
    recognised(Local(tensors, hidden_size=16))
    assert patterns(tmp_path) == {
        "blocks.{layer}.norm.weight": ('"replicate"', "sure"),
        "blocks.{layer}.scale.weight": ('{ pattern = "shard", dim = 0 }', "likely"),
        "blocks.{layer}.drift.weight": ('"partial"', "likely"),
        "blocks.{layer}.bias": ("", "open"),
        "blocks.{layer}.up.weight": ('{ pattern = "shard", dim = 0 }', "likely"),
        "blocks.{layer}.big.weight": ('"replicate"', "sure"),
        "blocks.{layer}.almost.weight": ('"partial"', "likely"),
        "blocks.{layer}.experts.{expert}.w.weight": ("", "open"),
    }


def test_only_what_no_family_knows_is_proposed(recognised, tmp_path):
    shards = Shards(tmp_path)
    names = ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight", "output_layer.weight"]
    tensors = [own for name in names for own in held(shards, name, [noise(6, 4), noise(6, 4)])]
    tensors += held(shards, "decoder.layers.0.adapter.weight", [noise(2, 4), noise(2, 4)])
    recognised(Local(tensors, hidden_size=4))
    assert patterns(tmp_path) == {"decoder.layers.{layer}.adapter.weight": ('{ pattern = "shard", dim = 0 }', "likely")}
    found = propose(tmp_path)
    assert len(found.extends) == 1
    assert f'extends = ["{found.extends[0]}"]' in found.toml
    assert len(patterns(tmp_path, everything=True)) == 4


def test_nothing_there(recognised, tmp_path):
    recognised(Local([]))
    with pytest.raises(MalformedError, match="not one tensor"):
        propose(tmp_path)


class Whole(Format):
    """A format that records wholes."""

    def __init__(self, atoms, topology) -> None:
        self.index = Index(
            path="x",
            format="x",
            evidence=(),
            producer="",
            topology=topology,
            step=None,
            atoms={a.name: a for a in atoms},
        )

    def read(self, path):
        return self.index


def atom(name: str, shape, boxes, **patterns_of_it: Pattern) -> AtomIndex:
    pieces = tuple(Fragment(box=box, ref=inline(np.zeros(box.sizes, "float32"))) for box in boxes)
    state = StateIndex(dtype=DType.FLOAT32, global_shape=shape, fragments=pieces)
    layout = Layout(tuple(AxisLayout(axis, 2, own) for axis, own in patterns_of_it.items()))
    return AtomIndex(name=name, global_shape=shape, kind=Kind.PARAMETER, states={"weight": state}, layout=layout)


def rows(shape, parts: int) -> list[Box]:
    step = shape[0] // parts
    return [Box((at * step, 0), (step, shape[1])) for at in range(parts)]


def test_a_model_of_recorded_wholes(recognised, tmp_path):
    shape = (8, 4)
    atoms = [
        atom("blocks.0.a", shape, [Box.whole(shape)]),
        atom("blocks.0.b", shape, rows(shape, 2)),
        atom("blocks.0.c", shape, rows(shape, 4)),
        atom("blocks.0.d", shape, [Box((0, 0), (4, 4)), Box((4, 0), (4, 2)), Box((4, 2), (4, 2))]),
        atom("blocks.0.e", shape, rows(shape, 8), tp=Shard(1)),
        atom("blocks.0.f", shape, rows(shape, 8), tp=Shard(0, blocks=(4, 4))),
        SimpleNamespace(name="blocks.0.g", global_shape=shape, patterns={}, states={}),
    ]
    recognised(Whole(atoms, Topology(tp=2)))
    found = {name[-1]: pattern for name, (pattern, _) in patterns(tmp_path).items()}
    shard = '{ pattern = "shard", dim = 0 }'
    gate = '{ pattern = "shard", dim = 0, blocks = ["dim / 2", "dim / 2"] }'
    assert found == {
        "a": '"replicate"', "b": shard, "c": gate, "d": "", "e": shard.replace("0", "1"), "f": gate, "g": "",
    }  # fmt: skip


def test_how_the_checkpoint_is_read_goes_before_its_pieces(recognised, tmp_path):
    """ZeRO cuts what tensor-parallel ranks hold copies of: its pieces say nothing of them."""
    shape = (8, 4)
    atoms = [
        atom("blocks.0.a", shape, rows(shape, 4), tp=Replicate()),
        atom("blocks.0.b", shape, rows(shape, 4), tp=Partial()),
        atom("blocks.0.c", shape, rows(shape, 4), tp=Shard(0, blocks=(4, 2, 2))),
        atom("blocks.0.d", shape, rows(shape, 4), tp=Shard(0)),
        atom("blocks.1.d", shape, rows(shape, 4), tp=Replicate()),
    ]
    recognised(Whole(atoms, Topology(tp=2)))
    assert {name[-1]: pattern for name, (pattern, _) in patterns(tmp_path).items()} == {
        "a": '"replicate"',
        "b": '"partial"',
        "c": '{ pattern = "shard", dim = 0, blocks = [4, 2, 2] }',
        "d": "",
    }


def test_the_parts_have_their_own_shape(recognised, tmp_path):
    shape = (8, 6)
    atoms = [
        atom("blocks.0.a", shape, [Box.whole(shape)], tp=Shard(1)),
        atom("blocks.0.b", shape, [Box.whole(shape)], tp=Replicate()),
        atom("blocks.0.c", shape, rows(shape, 2)),
        atom("blocks.0.d", (7, 6), [Box.whole((7, 6))], tp=Shard(0)),
    ]
    recognised(Whole(atoms, Topology(tp=2)))
    told = {own.template[-1]: own.why.rpartition("; ")[2] for own in propose(tmp_path, everything=True).proposals}
    assert told == {
        "a": "parts of [[8, 3]]",
        "b": "parts of [[8, 6]]",
        "c": "parts of [[4, 6]]",
        "d": "cut from [[7, 6]]",
    }


def test_one_rank_tells_nothing(recognised, tmp_path):
    recognised(Whole([atom("blocks.0.a", (8, 4), [Box.whole((8, 4))])], Topology(dp=8)))
    assert propose(tmp_path) == Proposed(extends=(), proposals=(), toml="")
