from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

import ucp
from ucp.core.gaps import check_cover
from ucp.core.index import Fragment, Kind, ParamGroup, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box
from ucp.core.tensor import DType
from ucp.source.read import index_of
from ucp.testing.handmade import Shards, make_index
from ucp.transfer.compare import find_drift, scan_digests, scan_records
from ucp.transfer.differences import compare


class Watch:
    def __init__(self):
        self.total = self.done = 0

    def begin(self, *, title, nbytes):
        self.total += nbytes

    def advance(self, nbytes):
        self.done += nbytes

    def end(self): ...


@pytest.fixture
def shards(tmp_path):
    return Shards(tmp_path / "a")


def index(shards, **arrays):
    states = {(name, "weight"): shards.whole(array) for name, array in arrays.items()}
    return make_index(shards.folder, states)


def changes(a, b, **more):
    return [(c.param, c.state, c.what, c.a, c.b) for c in compare(a, b, Watch(), **more)]


class TestStructure:
    def test_equal_checkpoints_have_no_change(self, shards):
        array = np.arange(1000, dtype="float32")
        watch = Watch()
        assert compare(index(shards, w=array), index(shards, w=array), watch) == []
        assert watch.done == watch.total == 4000

    def test_what_only_one_has(self, shards):
        array = np.zeros(3, "float32")
        a, b = index(shards, w=array, x=array), index(shards, w=array, y=array)
        assert changes(a, b) == [("x", "", "missing", "present", "missing"), ("y", "", "missing", "missing", "present")]

    def test_states_that_only_one_has(self, shards):
        whole = shards.whole(np.zeros(3, "float32"))
        a = make_index(shards.folder, {("w", "weight"): whole, ("w", "exp_avg"): whole})
        b = make_index(shards.folder, {("w", "weight"): whole, ("w", "step"): whole})
        assert changes(a, b) == [
            ("w", "exp_avg", "missing", "present", "missing"),
            ("w", "step", "missing", "missing", "present"),
        ]

    def test_shapes_and_kinds(self, shards):
        a = index(shards, w=np.zeros((2, 3), "float32"))
        b = index(shards, w=np.zeros((3, 2), "float32"))
        b.atoms["w"] = replace(b.atoms["w"], kind=Kind.BUFFER)
        assert changes(a, b) == [
            ("w", "", "kind", "parameter", "buffer"),
            ("w", "weight", "shape", "[2, 3]", "[3, 2]"),
        ]

    def test_ties_and_groups(self, shards):
        own = index(shards, w=np.zeros(3, "float32"), x=np.zeros(3, "float32"))
        a = replace(own, aliases={"t": "w"}, groups=(ParamGroup(params=("w", "x"), hyper={"lr": 1e-3}),))
        b = replace(
            own,
            groups=(
                ParamGroup(params=("x",), hyper={"lr": 1e-3}),
                ParamGroup(params=("w",), hyper={"lr": 1e-4, "eps": 0}),
            ),
        )
        as_list = ParamGroup(params=("w", "x"), hyper={"lr": 1e-3, "betas": [0.9, 0.95]})  # as JSON has them
        as_tuple = replace(as_list, hyper={"lr": 1e-3, "betas": (0.9, 0.95)})
        assert changes(replace(own, groups=(as_list,)), replace(own, groups=(as_tuple,))) == []
        assert changes(a, b) == [
            ("t", "", "alias", "w", "-"),
            ("w", "eps", "group", "-", "0"),
            ("w", "lr", "group", "0.001", "0.0001"),
        ]

    def test_groups_that_only_one_has(self, shards):
        """A side without any is told once, a parameter that left its group by name; one without elements is in none."""
        array = np.zeros(3, "float32")
        own = index(shards, w=array, x=array, empty=array[:0])
        a = replace(own, groups=(ParamGroup(params=("w", "x", "empty"), hyper={"lr": 1e-3}),))
        assert changes(a, own) == [("", "", "group", "3 parameters in groups", "-")]
        assert changes(own, a) == [("", "", "group", "-", "3 parameters in groups")]
        left = replace(own, groups=(ParamGroup(params=("w",), hyper={"lr": 1e-3}),))
        assert changes(a, left) == [("x", "", "group", "in a group", "-")]
        assert changes(a, replace(left, atoms={"w": own.atoms["w"]}))[-1][:3] == ("empty", "", "missing")

    def test_a_frozen_parameter_may_be_in_a_group(self, shards):
        """torch lists it in one and DeepSpeed does not; nothing steps it."""
        array = np.zeros(3, "float32")
        a = replace(index(shards, w=array, x=array), groups=(ParamGroup(params=("w", "x"), hyper={"lr": 1e-3}),))
        a.atoms["x"] = replace(a.atoms["x"], kind=Kind.FROZEN)
        b = replace(a, groups=(ParamGroup(params=("w",), hyper={"lr": 1e-3}),))
        assert not changes(a, b)
        assert not changes(b, a)


class TestValues:
    def test_elements_that_differ_are_counted_over_blocks(self, shards, monkeypatch):
        monkeypatch.setattr(import_module("ucp.transfer.compare"), "BLOCK", 64)
        array = np.arange(1000, dtype="float32")
        other = array.copy()
        other[[3, 500, 999]] += [1, 7, 2]
        (change,) = compare(index(shards, w=array), index(shards, w=other), Watch())
        assert (change.what, change.numel, change.largest, change.a) == ("values", 3, 7.0, "3 of 1,000 elements")

    def test_not_a_number_is_the_largest_difference(self, shards, monkeypatch):
        monkeypatch.setattr(import_module("ucp.transfer.compare"), "BLOCK", 64)
        array = np.zeros(100, dtype="float32")
        other = array.copy()
        other[[1, 50]] = [5, np.nan]
        (change,) = compare(index(shards, w=array), index(shards, w=other), Watch())
        assert math.isnan(change.largest)

    def test_another_dtype_is_a_change_and_values_are_compared_all_the_same(self, shards):
        array = np.array([1.0, 2.5, 3.0], dtype="float32")
        a, b = index(shards, w=array), index(shards, w=array.astype("float16"))
        assert changes(a, b) == [("w", "weight", "dtype", "float32", "float16")]
        array[1] = 2.50001
        assert [c[2] for c in changes(index(shards, w=array), b)] == ["dtype", "values"]

    def test_a_cast_that_was_asked_for_is_no_change(self, shards):
        array = np.array([1.0, 2.50001, 1e30], dtype="float32")
        with np.errstate(over="ignore"):
            b = index(shards, w=array.astype("float16"))
        assert changes(index(shards, w=array), b, cast=True) == []

    def test_any_nan_is_the_cast_of_any_nan(self, shards):
        array = np.array([1.0, math.nan, 3.0], dtype="float32")
        copy = array.astype("float16")
        copy.view("uint16")[1] = 0xFFFF
        assert changes(index(shards, w=array), index(shards, w=copy), cast=True) == []
        assert [c[2] for c in changes(index(shards, w=array), index(shards, w=copy))] == ["dtype"]
        same = array.copy()
        same.view("uint32")[1] = 0xFFFFFFFF
        assert [c[2] for c in changes(index(shards, w=array), index(shards, w=same))] == ["values"]

    @pytest.mark.parametrize("dtypes", [("int64", "float32"), ("complex64", "float32"), ("bool", "uint8")])
    def test_types_that_cannot_be_cast_are_compared_as_numbers(self, shards, dtypes):
        arrays = [np.array([0, 1, 1]).astype(dtype) for dtype in dtypes]
        a, b = (index(shards, w=array) for array in arrays)
        assert [c[2] for c in changes(a, b)] == ["dtype"]


class TestScans:
    def test_records_that_differ_are_named_and_all_is_read(self, shards):
        state = shards.whole(np.arange(100, dtype="float32"))
        record = shards.record(state.fragments[0].ref)
        own = make_index(shards.folder, {("w", "weight"): state}, records=[record])
        watch = Watch()
        assert scan_records(own, watch) == []
        assert watch.done == watch.total == 400
        wrong = replace(record, crc32=record.crc32 ^ 1)
        assert scan_records(replace(own, records=(wrong,)), Watch()) == [wrong]

    def test_digests_that_differ_are_named(self, source, tmp_path, small_blocks):
        ucp.convert(source, tmp_path / "out")
        own = index_of(tmp_path / "out")
        assert scan_digests(own, Watch()) == []
        atom = own.atoms["embed"]
        state = atom.states["weight"]
        digests = (*state.digests[:3], "0" * 16, *state.digests[4:])
        own.atoms["embed"] = replace(atom, states={"weight": replace(state, digests=digests)})
        (line,) = scan_digests(own, Watch())
        assert line.startswith("embed/weight, elements 48:64")

    def test_copies_are_compared_block_by_block(self, shards, monkeypatch):
        monkeypatch.setattr(import_module("ucp.transfer.compare"), "BLOCK", 64)
        array = np.arange(100, dtype="float32")
        other = array.copy()
        other[[10, 90]] += 3
        box = Box.full((100,))
        fragments = (
            Fragment(box=box, ref=shards.put(array)),
            Fragment(box=box, ref=shards.put(other, file="copy.bin"), replica=1),
        )
        state = StateIndex(dtype=DType.FLOAT32, global_shape=(100,), fragments=fragments, overlap=Overlap.EQUAL)
        own = make_index(shards.folder, {("w", "weight"): state})
        lines = find_drift(own, Watch())
        assert len(lines) == 2
        assert all("copy.bin" in line and "by up to 3" in line for line in lines)


class TestReading:
    @pytest.mark.parametrize("dtype", list(DType))
    def test_every_dtype_becomes_a_tensor(self, shards, dtype, tmp_path):
        torch = pytest.importorskip("torch")
        from tests.strategies import random_array
        from ucp.testing.handmade import write_checkpoint

        array = random_array((3, 4), dtype, 1, bits=True)
        write_checkpoint(index(shards, w=array, s=array[0, 0].reshape(()), none=array[:0]))
        checkpoint = ucp.open(shards.folder)
        found = checkpoint.read("w", "weight")
        assert found.dtype == getattr(torch, dtype.value)
        assert found.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()
        part = checkpoint.read("w", "weight", ucp.Box((1, 2), (2, 1)))
        assert part.shape == (2, 1)
        assert part.reshape(-1).view(torch.uint8).numpy().tobytes() == array[1:3, 2:3].tobytes()
        assert checkpoint.read("s", "weight").shape == ()
        assert checkpoint.read("none", "weight").shape == (0, 4)

    def test_a_region_outside_is_refused(self, shards):
        from ucp.testing.handmade import write_checkpoint

        write_checkpoint(index(shards, w=np.zeros((3, 4), "float32")))
        checkpoint = ucp.open(shards.folder)
        for box in (ucp.Box((2, 0), (2, 4)), ucp.Box((0,), (1,))):
            with pytest.raises(ValueError, match=r"w/weight .*\[3, 4\]"):
                checkpoint.read("w", "weight", box)


class Counted(tuple):
    """Fragments that count how often they are gone through."""

    __slots__ = ()
    rounds = 0

    def __iter__(self):
        Counted.rounds += 1
        return super().__iter__()


def test_thousands_of_copies_are_gone_through_a_few_times(shards):
    """Not once for each."""
    ref, box = shards.put(np.arange(4, dtype="float32")), Box.full((4,))
    copies = (Fragment(box=box, ref=ref, replica=n) for n in range(2000))
    state = StateIndex(dtype=DType.FLOAT32, global_shape=(4,), fragments=Counted(copies), overlap=Overlap.EQUAL)
    own = make_index(shards.folder, {("w", "weight"): state})
    Counted.rounds = 0
    check_cover(own)
    assert find_drift(own, Watch()) == []
    assert compare(own, own, Watch()) == []
    assert Counted.rounds < 20
