"""What a checkpoint says beside its tensors survives JSON, or is refused; it is never silently another value."""

from __future__ import annotations

import contextlib
import json
import math
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.errors import MalformedError
from ucp.io.pickle.values import GlobalName, Stub, TorchSize
from ucp.store.values import NotPlainError, from_json, to_json

TEXT = st.text(max_size=6) | st.sampled_from(["!", "!tuple", "!dict", "!float", "\ud800", "\x00", "é"])
KEYS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXT
    | st.binary(max_size=3)
    | st.builds(GlobalName, TEXT, TEXT)
    | st.tuples(st.integers(), TEXT)
    | st.lists(st.integers(), max_size=2).map(TorchSize)
)
LEAVES = KEYS | st.complex_numbers(allow_nan=True) | st.binary(max_size=3).map(bytearray)


def _nested(inner):
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(TEXT, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    )


PLAIN = st.recursive(LEAVES, _nested, max_leaves=12)


def shape(value: object) -> object:
    """`value` in a form in which equal means equal: types told apart, nan equal to itself, order of dicts kept."""
    if isinstance(value, float):
        return "float", "nan" if math.isnan(value) else value.hex()
    if isinstance(value, complex):
        return "complex", shape(value.real), shape(value.imag)
    if isinstance(value, dict):
        return type(value), [(shape(key), shape(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, map(shape, value)))
    if isinstance(value, list | tuple):
        return type(value), [shape(item) for item in value]
    return type(value), value


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value):
    text = json.dumps(to_json(value), allow_nan=False)
    assert shape(from_json(json.loads(text))) == shape(value)


@given(st.sets(TEXT, min_size=2) | st.frozensets(KEYS, min_size=2))
def test_sets_are_written_in_one_order(value):
    """Hashes of text differ from run to run; what is written must not."""
    again = type(value)(reversed(list(value)))
    assert json.dumps(to_json(value)) == json.dumps(to_json(again))
    items = [json.dumps(item) for item in next(iter(to_json(value).values()))]
    assert items == sorted(items)


TAGS = [f"!{kind}" for kind in ("float", "complex", "bytes", "bytearray", "global", "dict", "ordered", "tuple")]
TAGS += ["!size", "!set", "!frozenset", "!", "!unknown"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXT, inner, max_size=3)
        | st.builds(
            lambda tag, item: {tag: item},
            st.sampled_from(TAGS),
            inner,
        )
    ),
    max_leaves=10,
)


@given(JSON)
def test_any_json_is_a_value_or_malformed(document):
    with contextlib.suppress(MalformedError):
        from_json(document)


@pytest.mark.parametrize("value", [Stub(GlobalName("a", "b")), object(), [Stub(GlobalName("a", "b"))], range(3)])
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(NotPlainError):
        to_json(value)


def test_a_cycle_is_refused():
    value: list[object] = []
    value.append(value)
    with pytest.raises(NotPlainError, match="cycle"):
        to_json(value)


def test_numbers_too_long_for_json_are_refused():
    assert from_json(to_json(1 << 4000)) == 1 << 4000
    with pytest.raises(NotPlainError, match="digits"):
        to_json(1 << 20000)


def test_json_nested_without_end_is_malformed():
    document: object = None
    for _ in range(100_000):
        document = [document]
    with pytest.raises(MalformedError):
        from_json(document)


@pytest.mark.parametrize("text", ["!!!!", "a", "QUJD$"])
def test_bytes_that_are_not_base64_are_malformed(text):
    with pytest.raises(MalformedError, match="!bytes"):
        from_json({"!bytes": text})
