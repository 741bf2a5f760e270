from __future__ import annotations

import argparse
import pickle
import re
import sys
from collections import OrderedDict, defaultdict, deque

import pytest

from tests.unit.io.pickle.test_unpickle import VALUES as PLAIN_VALUES
from tests.unit.io.pickle.test_unpickle import Colour, Outer, Plain, WithKeywords, Words
from ucp.core.tensor import DType, TensorRef
from ucp.errors import DestinationError
from ucp.io.pickle.emit import emit_pickle
from ucp.io.pickle.unpickle import parse_pickle
from ucp.io.pickle.values import GlobalName, Stub, TorchSize
from ucp.io.torch_file.storage import NewStorage, NewTensor


def reloaded(value: object, protocol: int = 2) -> object:
    """`value` through pickle, our reader, our writer, and pickle."""
    return pickle.loads(emit_pickle(parse_pickle(pickle.dumps(value, protocol), where="test").value).data)


VALUES = [
    *PLAIN_VALUES,
    (1, 2, 3, 4),
    list(range(1000)),
    list(range(1001)),
    {str(i): i for i in range(1001)},
    frozenset({1, (2,)}),
    Colour.RED,
    Plain(a=1, b=Plain(c=[2])),
    argparse.Namespace(a=argparse.Namespace(b=1)),
    defaultdict(list, x=[1]),
    deque([1, 2], maxlen=3),
    Words(["a", "b"]),
    Outer.Inner,
    len,
    [Plain, OrderedDict],
]


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickle_loads_what_was_read(protocol: int) -> None:
    for value in VALUES:
        result = reloaded(value, protocol)
        assert type(result) is type(value)
        assert result == value
        assert repr(result) == repr(value) or isinstance(value, Plain)


def test_the_bytes_are_those_of_the_pickler() -> None:
    """Where it has the same recipe and order of sets, and shares strings by identity."""
    for value in VALUES:
        if not isinstance(value, bytearray | set | frozenset | Plain | argparse.Namespace | deque | range):
            pickled = pickle.dumps(value, 2)
            assert emit_pickle(parse_pickle(pickled, where="test").value).data == pickled, value


def test_keyword_arguments() -> None:
    result = reloaded(WithKeywords(1, b=5), 4)
    assert isinstance(result, WithKeywords)
    assert result.b == 5


def test_shared_values_stay_shared() -> None:
    shared, plain, size = [1], Plain(), OrderedDict(a=1)
    key = (1, 2)
    result = reloaded([shared, shared, plain, plain, {"x": shared, key: plain}, key, size, size])
    assert isinstance(result, list)
    assert result[0] is result[1] is result[4]["x"]
    assert result[2] is result[3] is result[4][1, 2]
    assert result[6] is result[7]


@pytest.mark.parametrize("numel", [1, 2, 3, 4])
def test_a_tuple_that_holds_itself(numel: int) -> None:
    inner: list[object] = []
    loop = (inner, *range(numel - 1))
    inner.append(loop)
    result = reloaded(loop)
    assert isinstance(result, tuple)
    assert result[0][0] is result


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_set_of_objects_that_hold_the_set(protocol: int) -> None:
    members: set[Plain] = set()
    members.update(Plain() for _ in range(5))
    for member in members:
        member.all = members  # type: ignore[attr-defined]
    result = reloaded(members, protocol)
    assert isinstance(result, set)
    assert len(result) == 5
    assert all(member.all is result for member in result)


def test_an_object_among_its_own_arguments_is_refused() -> None:
    value = Stub(GlobalName("a", "b"), new=False)
    value.args = (frozenset([value]),)
    with pytest.raises(DestinationError, match="among"):
        emit_pickle(value)


def test_depth_is_no_danger() -> None:
    depth = 12_000
    value: object = None
    for index in range(depth):
        value = ([value], {1: value}, (value,), Stub(GlobalName("a", "b"), state=value, has_state=True))[index % 4]
    data = emit_pickle(value).data
    limit = sys.getrecursionlimit()
    again = emit_pickle(parse_pickle(data, where="test").value).data
    assert again == data
    assert sys.getrecursionlimit() == limit


def test_names_and_sizes_are_written_for_torch() -> None:
    data = emit_pickle([TorchSize((2, 3)), GlobalName("torch", "float32"), GlobalName("a", "B.C.D")]).data
    assert parse_pickle(data, where="test").value == [
        (2, 3),
        GlobalName("torch", "float32"),
        GlobalName("a", "B.C.D"),
    ]
    assert b"ctorch\nSize\n" in data


def test_storages_are_keyed_in_the_order_of_the_pickle() -> None:
    first, second = NewStorage(DType.FLOAT32, 2), NewStorage(DType.FLOAT32, 2)
    one = NewTensor(storage=first, shape=(2,), strides=(1,))
    two = NewTensor(storage=second, shape=(2,), strides=(1,))
    assert emit_pickle([two, one, two]).storages == (second, first)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(object(), id="object"),
        DType.FLOAT32,
        TensorRef(path="x", offset=0, dtype=DType.FLOAT32, shape=(), strides=()),
        GlobalName("a\nb", "c"),
        GlobalName("a", "\ud800"),
    ],
    ids=repr,
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(DestinationError, match=rf"cannot write .*{type(value).__name__}"):
        emit_pickle([value])


def test_tensors_lie_in_their_storages() -> None:
    storage = NewStorage(DType.FLOAT32, 6)
    NewTensor(storage=storage, offset=1, shape=(2, 2), strides=(3, 1))
    NewTensor(storage=storage, offset=9, shape=(0, 2), strides=(3, 1))
    for offset, shape, strides in ((2, (2, 2), (3, 1)), (0, (7,), (1,)), (-1, (1,), (1,)), (0, (2,), (3, 1))):
        with pytest.raises(ValueError, match=re.escape(f"shape {shape}")):
            NewTensor(storage=storage, offset=offset, shape=shape, strides=strides)
    with pytest.raises(ValueError, match=r"got -1$"):
        NewStorage(DType.FLOAT32, -1)
