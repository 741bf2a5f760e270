from __future__ import annotations

from collections import OrderedDict

import pytest

from ucp.contract.ranks import Checksums, make_rank_extras
from ucp.core.index import Extra
from ucp.core.tensor import DType, Record, TensorRef
from ucp.io.pickle.values import GlobalName, Stub


def record(path: str, offset: int, nbytes: int, crc32: int) -> Record:
    return Record(path=path, name="data/0", offset=offset, nbytes=nbytes, crc32=crc32)


def ref(path: str, offset: int, *shape: int) -> TensorRef:
    strides = tuple(1 for _ in shape)
    return TensorRef(path=path, offset=offset, dtype=DType.FLOAT32, shape=shape, strides=strides)


RECORDS = Checksums(
    [
        record("a", 100, 8, 1),
        record("a", 200, 8, 2),
        record("b", 64, 8, 1),
        record("b", 128, 8, 3),
        record("b", 192, 16, 1),
    ]
)


@pytest.mark.parametrize(
    ("mine", "other", "same"),
    [
        (ref("a", 100, 2), ref("b", 64, 2), True),
        (ref("a", 104, 1), ref("b", 68, 1), True),
        (ref("a", 104, 1), ref("b", 64, 1), None),
        (ref("a", 100, 2), ref("b", 128, 2), False),
        (ref("a", 100, 1), ref("b", 128, 1), None),
        (ref("a", 100, 2), ref("b", 192, 2), None),
        (ref("a", 100, 2), ref("c", 64, 2), None),
        (ref("a", 100, 2), ref("a", 100, 2), True),
        (ref("c", 100, 2), ref("c", 100, 2), True),
        (ref("a", 100, 2), ref("b", 64, 1), False),
        (ref("x", 0, 0), ref("y", 0, 0), True),
        (ref("a", 99, 1), ref("b", 64, 1), None),
        (ref("a", 104, 2), ref("b", 68, 2), None),
    ],
)
def test_tensors_by_the_checksums_of_their_storages(mine: TensorRef, other: TensorRef, same: bool | None) -> None:
    assert RECORDS.has_same_bytes(mine, other) is same
    assert RECORDS.has_same_bytes(other, mine) is same


def scaler(scale: float) -> Stub:
    return Stub(GlobalName("m", "LossScaler"), state={"cur_scale": scale}, has_state=True)


@pytest.mark.parametrize(
    ("mine", "other", "same"),
    [
        ({"a": [1, (2.0, None)]}, {"a": [1, (2.0, None)]}, True),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1, 2], [1], False),
        ([1], (1,), False),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (scaler(1.0), scaler(1.0), True),
        (scaler(1.0), scaler(2.0), False),
        (scaler(1.0), Stub(GlobalName("m", "Other"), state={"cur_scale": 1.0}, has_state=True), False),
        ({"rng": ref("a", 100, 2)}, {"rng": ref("b", 64, 2)}, True),
        ({"rng": ref("a", 100, 2)}, {"rng": ref("b", 128, 2)}, False),
        ({"rng": ref("a", 100, 2)}, {"rng": [1]}, False),
        (GlobalName("torch", "float32"), GlobalName("torch", "float32"), True),
    ],
)
def test_values(mine: object, other: object, same: bool) -> None:
    assert RECORDS.is_same(mine, other) is same


def test_extras_of_one_value() -> None:
    assert make_rank_extras("x", {0: 1, 1: 1}, RECORDS) == [Extra(name="x", value=1)]
    assert make_rank_extras("x", {0: 1, 1: 2}, RECORDS) == [Extra(name="x", value=1), Extra(name="x", value=2, rank=1)]


def test_extras_of_dicts_are_split_by_key() -> None:
    values = {0: {"a": 1, "b": 2}, 1: {"a": 1, "b": 3, "c": 4}, 2: {"a": 1, "b": 2}}
    assert make_rank_extras("x", values, RECORDS) == [
        Extra(name="x", value={"a": 1, "b": 2}),
        Extra(name="x", value={"b": 3, "c": 4}, rank=1),
    ]


def test_a_key_that_only_the_first_rank_has_is_its_own() -> None:
    values = {0: {"a": 1, "b": 2}, 1: {"a": 1}}
    assert make_rank_extras("x", values, RECORDS) == [
        Extra(name="x", value={"a": 1}),
        Extra(name="x", value={"b": 2}, rank=0),
    ]


def test_empty_dicts_are_kept() -> None:
    assert make_rank_extras("x", {0: {}, 1: {}}, RECORDS) == [Extra(name="x", value={})]


def deep(depth: int, leaf: object) -> object:
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


def doubled(times: int, leaf: object, *, by: type) -> object:
    value = leaf
    for _ in range(times):
        value = by([value, value])
    return value


def test_depth_is_no_danger() -> None:
    assert RECORDS.is_same(deep(30_000, 1), deep(30_000, 1))
    assert not RECORDS.is_same(deep(30_000, 1), deep(30_000, 2))


@pytest.mark.parametrize("by", [list, tuple])
def test_what_is_shared_is_looked_into_once(by: type) -> None:
    assert RECORDS.is_same(doubled(200, 1, by=by), doubled(200, 1, by=by))
    assert not RECORDS.is_same(doubled(200, 1, by=by), doubled(200, 2, by=by))


def cycle(length: int, last: object = None) -> list[object]:
    first: list[object] = []
    at = first
    for _ in range(length - 1):
        following: list[object] = []
        at += [following, None]
        at = following
    at += [first, last]
    return first


def test_what_lies_in_itself() -> None:
    assert RECORDS.is_same(cycle(3), cycle(3))
    assert RECORDS.is_same(cycle(1009), cycle(1013)), "lists of the same lists without end, in circles of two lengths"
    assert not RECORDS.is_same(cycle(3), cycle(3, last=1))


def test_attributes_of_a_dict_and_order_of_its_kind_count() -> None:
    a, b = OrderedDict(x=1), OrderedDict(x=1)
    assert RECORDS.is_same(a, b)
    a._metadata = {"version": 1}  # type: ignore[attr-defined]
    assert not RECORDS.is_same(a, b)
    assert not RECORDS.is_same(a, {"x": 1})
