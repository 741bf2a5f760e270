from __future__ import annotations

from collections import OrderedDict

import pytest

from ucp.core.tensor import DType, InlineTensor, TensorRef
from ucp.io.pickle.values import GlobalName, Stub, TensorPair, TorchSize, find_differing_values


def found(a, b):
    return [(item.place, item.a, item.b) for item in find_differing_values(a, b)]


def stub(name="C", **state):
    return Stub(GlobalName("m", name), state=state, has_state=True)


NESTED = {"lr": [0.1, {"eps": float("nan")}], 3: (1, None), "seen": {1, "b"}, "sched": stub(steps=[1, 2], own=-0.0)}


@pytest.mark.parametrize("value", [None, True, [1 << 20000], b"\xff", TorchSize((2,)), GlobalName("a", "b"), NESTED])
def test_nothing_differs_from_itself(value):
    assert found({"x": value}, {"x": value}) == []


def test_equal_values_that_are_other_objects():
    again = {"seen": {"b", 1}, "sched": stub(own=-0.0, steps=[1, 2]), 3: (1, None), "lr": [0.1, {"eps": float("nan")}]}
    assert found(NESTED, again) == []


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1, True, [("", "1", "True")]),
        (0.0, -0.0, [("", "0.0", "-0.0")]),
        ([1, 2], (1, 2), [("", "list of 2", "tuple of 2")]),
        ([1, 2, 3], [1, 5], [("[1]", "2", "5"), ("[2]", "3", "-")]),
        ({"a": {"b": 1}, 2: 3}, {"a": {"c": 1}, 2: 4}, [("a.b", "1", "-"), ("a.c", "-", "1"), ("[2]", "3", "4")]),
        ({1}, {1, 2}, [("[2]", "-", "2")]),
        ({1: "x"}, {True: "x"}, [("[1]", "'x'", "-"), ("[True]", "-", "'x'")]),
        (OrderedDict(a=1), {"a": 1}, [("", "OrderedDict of 1", "dict of 1")]),
        (stub(n=1), stub(n=2), [("state.n", "1", "2")]),
        (stub("C"), stub("D"), [("", "an object of m.C", "an object of m.D")]),
        ("x" * 100, "y", [("", f"'{'x' * 60}'... (100)", "'y'")]),
        ([1 << 20000], [1], [("[0]", "a number of 20001 bits", "1")]),
        ({(1, stub(a=1)): 2}, {(1, stub(a=1)): 3}, [("[tuple of 2]", "2", "3")]),
    ],
)
def test_each_difference_has_its_place(a, b, expected):
    assert found(a, b) == expected


def test_attributes_of_an_ordered_dict():
    a, b = OrderedDict(), OrderedDict()
    a._metadata, b._metadata = {"version": 1}, {"version": 2}
    assert found(a, b) == [("_metadata.version", "1", "2")]


def test_tensors_are_given_once_or_differ_in_shape():
    ref = TensorRef(path="a", offset=0, dtype=DType.INT8, shape=(2, 3), strides=(3, 1))
    other = TensorRef(path="b", offset=9, dtype=DType.INT8, shape=(2, 3), strides=(1, 2))
    assert list(find_differing_values([ref, {"x": ref}], [other, {"x": other}])) == [
        TensorPair(place="[0]", a=ref, b=other)
    ]
    number = InlineTensor(data=b"\0", dtype=DType.INT8)
    assert found({"t": ref}, {"t": number}) == [("t", "tensor 2x3 int8", "tensor of one element int8")]
    assert found(ref, 3) == [("", "tensor 2x3 int8", "3")]


def deep(leaf, depth=30_000):
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def test_depth_and_sharing_and_cycles_are_no_danger():
    assert found(deep(1), deep(1)) == []
    (place, *both), *rest = found(deep(1), deep(2))
    assert (place, both, rest) == ("..." + "[0]" * 12, ["1", "2"], [])
    shared, other = (1,), (1,)
    for _ in range(200):
        shared, other = (shared, shared), (other, other)
    assert found(shared, other) == []
    a, b = [1], [1]
    a.append(a)
    b.append(b)
    assert found(a, b) == []
    b.append(2)
    assert found(a, b) == [("[2]", "-", "2")]
