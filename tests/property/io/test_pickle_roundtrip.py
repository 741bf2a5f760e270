"""Laws of the reader and the writer of pickles, on generated trees of plain values."""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucp.io.pickle.emit import emit_pickle
from ucp.io.pickle.unpickle import parse_pickle
from ucp.io.pickle.values import GlobalName, Stub, TorchSize

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.builds(bytearray, st.binary())
)
KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.frozensets(inner, max_size=4),
    max_leaves=6,
)


def branches(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Containers of `inner`."""
    return (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    )


TREES = st.recursive(SCALARS, branches, max_leaves=40)
NAMES = st.builds(
    GlobalName,
    st.just("some.module"),
    st.from_regex(r"[A-Za-z_][a-z0-9]{0,5}(\.[A-Za-z_][a-z0-9]{0,5})?", fullmatch=True),
)
INERT_TREES = st.recursive(
    SCALARS | NAMES | st.lists(st.integers(0, 2**40)).map(TorchSize),
    lambda inner: (
        branches(inner)
        | st.builds(
            Stub,
            NAMES,
            st.lists(inner, max_size=3).map(tuple),
            state=inner,
            has_state=st.just(True),
            items=st.lists(inner, max_size=3),
            entries=st.lists(st.tuples(KEYS, inner), max_size=3),
        )
    ),
    max_leaves=20,
)


RELAXED = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def canonical(value: object) -> object:
    """A value that compares by type, order and bits."""
    match value:
        case float():
            return "float", struct.pack(">d", value)
        case complex():
            return "complex", struct.pack(">dd", value.real, value.imag)
        case dict():
            return type(value).__name__, [(canonical(key), canonical(item)) for key, item in value.items()]
        case set() | frozenset():
            return type(value).__name__, sorted(repr(canonical(item)) for item in value)
        case list() | tuple():
            return type(value).__name__, [canonical(item) for item in value]
        case Stub():
            parts = (value.made_by, value.args, value.kwargs, value.new, value.state, value.has_state)
            return "Stub", [canonical(part) for part in (*parts, [*value.items], [*value.entries])]
        case _:
            return type(value).__name__, value


@RELAXED
@given(TREES, st.integers(0, 5))
def test_reading_is_the_inverse_of_pickling(tree: object, protocol: int) -> None:
    if protocol == 0:
        tree = repr(tree)
    assert canonical(parse_pickle(pickle.dumps(tree, protocol), where="test").value) == canonical(tree)


@RELAXED
@given(TREES)
def test_pickle_reads_what_is_written(tree: object) -> None:
    assert canonical(pickle.loads(emit_pickle(tree).data)) == canonical(tree)


@RELAXED
@given(INERT_TREES)
def test_reading_is_the_inverse_of_writing(tree: object) -> None:
    assert canonical(parse_pickle(emit_pickle(tree).data, where="test").value) == canonical(tree)
