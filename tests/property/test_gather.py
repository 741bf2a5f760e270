"""Any source layout into any target slice: the bytes are those that numpy's own indexing gives."""

from __future__ import annotations

import itertools
import math
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard
from ucp_patterns.unique import Unique

import ucp.core.slices
import ucp.transfer.gather
from tests.strategies import FLOATS, cuts, random_array, shapes, slices_of, states_of
from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box
from ucp.core.slices import Locator, in_file_order, resolve, resolve_replicas, runs_of
from ucp.core.target import Slice, full_slice
from ucp.core.tensor import DType
from ucp.errors import CoverError
from ucp.io.elements import numpy_dtype, viewed
from ucp.io.files import Sources
from ucp.testing.handmade import Shards
from ucp.transfer.gather import Gatherer

DTYPES = st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.INT64, DType.BOOL, DType.COMPLEX128, DType.FLOAT8_E5M2])
LIMITS = st.sampled_from([(8 << 20, 64 << 10), (32, 8), (64, 1 << 20), (16, 1)])


@st.composite
def arrays(draw, dtypes=DTYPES, *, bits: bool = True):
    return random_array(draw(shapes()), draw(dtypes), draw(st.integers(0, 1000)), bits=bits)


@st.composite
def patterns(draw, shape: tuple[int, ...]):
    if not shape:
        return Replicate()
    dim = draw(st.integers(0, len(shape) - 1))
    edges = draw(cuts(shape[dim]))
    blocks = tuple(b - a for a, b in itertools.pairwise(edges))
    return draw(st.sampled_from([Replicate(), Shard(dim), Shard(dim, blocks), Unique(0)]))


@contextmanager
def limits(stretch: int, gap: int):
    """Small bounds, so that pieces are cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ucp.transfer.gather, "MAX_READ", stretch)
        patch.setattr(ucp.core.slices, "GAP", gap)
        yield


@contextmanager
def shards():
    with tempfile.TemporaryDirectory() as folder:
        yield Shards(Path(folder))


def gathered(own: Slice, state: StateIndex, low: int, high: int) -> np.ndarray:
    data = memoryview(bytearray(b"\xee" * ((high - low) * own.dtype.itemsize)))
    gatherer = Gatherer(sources=Sources())
    gatherer.fill(data, own.dtype, resolve(own, Locator(state), low, high))
    gatherer.sources.close()
    return viewed(data, own.dtype)


def wanted(own: Slice, array: np.ndarray) -> np.ndarray:
    local = np.zeros(own.local_shape, dtype=array.dtype)
    for pair in own.pairs:
        local[index_of(pair.local)] = array[index_of(pair.global_box)]
    return local.reshape(-1)


def index_of(box: Box) -> tuple[slice, ...]:
    return (..., *(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@given(arrays(), LIMITS, st.data())
def test_any_source_into_any_slice(array, bounds, data):
    with shards() as folder, limits(*bounds):
        state = data.draw(states_of(array, folder))
        own = data.draw(slices_of(state, patterns(array.shape), state.dtype))
        assert same(gathered(own, state, own.start, own.stop), wanted(own, array)[own.start : own.stop])


@given(arrays(st.sampled_from(FLOATS), bits=False), st.sampled_from(FLOATS), LIMITS, st.data())
def test_casts_are_those_of_numpy(array, dtype, bounds, data):
    with shards() as folder, limits(*bounds):
        state = data.draw(states_of(array, folder))
        own = data.draw(slices_of(state, patterns(array.shape), dtype))
        found = gathered(own, state, own.start, own.stop)
        assert same(found, wanted(own, array)[own.start : own.stop].astype(numpy_dtype(dtype)))


@given(arrays(), st.data())
def test_copies_are_found_where_they_lie(array, data):
    with shards() as folder:
        state = data.draw(states_of(array, folder))
        own = data.draw(slices_of(state, patterns(array.shape), state.dtype))
        local = wanted(own, array)
        places = wanted(own, np.arange(array.size).reshape(array.shape))
        gatherer = Gatherer(sources=Sources())
        seen: dict[int, int] = {}
        for pieces in resolve_replicas(own, Locator(state), own.start, own.stop):
            for piece in pieces:
                for part, values in gatherer.read_values(piece):
                    at = part.dst_offset + sum(
                        np.ix_(*(np.arange(n) * s for n, s in zip(part.sizes, part.dst_strides, strict=True)))
                    )
                    assert same(values.reshape(-1).copy(), local[own.start + at.reshape(-1)])
                    for position in at.reshape(-1):
                        element = int(places[own.start + position])
                        seen[element] = seen.get(element, 0) + 1
        gatherer.sources.close()
        held = np.zeros(array.shape, dtype=int)
        for fragment in state.fragments:
            if fragment.replica:
                held[index_of(fragment.box)] += 1
        for element, times in seen.items():
            assert held.reshape(-1)[element] == times


@given(shapes(), st.integers(1, 4), st.sampled_from([DType.FLOAT32, DType.BFLOAT16]), LIMITS, st.data())
def test_a_mean_is_the_sum_in_order_divided(shape, count, dtype, bounds, data):
    """float32, one term after another, as DeepSpeed's own converter averages (rule MEAN is the only inexact one)."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    terms = [rng.normal(size=shape).astype(numpy_dtype(dtype)) for _ in range(count)]
    with shards() as folder, limits(*bounds):
        fragments = []
        for term, array in enumerate(terms):
            pieces = data.draw(states_of(array, folder)).fragments
            fragments += [Fragment(box=f.box, ref=f.ref, term=term) for f in pieces if f.replica == 0]
        state = StateIndex(dtype=dtype, global_shape=shape, fragments=tuple(fragments), overlap=Overlap.MEAN)
        own = data.draw(slices_of(state, patterns(shape), dtype))
        found = gathered(own, state, own.start, own.stop)
    total = np.zeros(shape, dtype=np.float32)
    for array in terms:
        total = total + array.astype(np.float32)
    mean = (total / np.float32(count)).astype(terms[0].dtype) if count > 1 else terms[0]
    assert same(found, wanted(own, mean)[own.start : own.stop])


@given(arrays(), st.data())
def test_a_hole_is_never_filled_with_silence(array, data):
    with shards() as folder:
        state = data.draw(states_of(array, folder))
        taken = [f for f in state.fragments if f.replica == 0 and f.box.numel]
        if not taken:
            return
        lost = data.draw(st.sampled_from(taken))
        holed = StateIndex(
            dtype=state.dtype,
            global_shape=state.global_shape,
            fragments=tuple(f for f in state.fragments if f is not lost),
        )
        own = full_slice("p", "s", holed)
        with pytest.raises(CoverError, match=f"p/s: .* {own.start}:{own.stop} "):
            resolve(own, Locator(holed), own.start, own.stop)


@given(shapes(least_dims=1, least=1), st.data())
def test_an_expanded_tensor_repeats_its_elements(shape, data):
    kept = tuple(data.draw(st.sampled_from((1, n))) for n in shape)
    array = random_array(kept, DType.FLOAT32, data.draw(st.integers(0, 99)), bits=True)
    with shards() as folder, limits(*data.draw(LIMITS)):
        strides = tuple(step // array.itemsize for step in np.broadcast_to(array, shape).strides)
        ref = replace(folder.put(array), shape=shape, strides=strides)
        state = StateIndex(dtype=DType.FLOAT32, global_shape=shape, fragments=(Fragment(box=Box.full(shape), ref=ref),))
        own = data.draw(slices_of(state, patterns(shape), DType.FLOAT32))
        full = np.broadcast_to(array, shape)
        assert same(gathered(own, state, own.start, own.stop), wanted(own, full)[own.start : own.stop])


@given(arrays(), LIMITS, st.data())
def test_no_read_is_longer_than_a_stretch_unless_it_goes_straight_to_its_place(array, bounds, data):
    """A strided or cast piece needs scratch; it is bounded, whatever the piece."""
    stretch, _ = bounds
    with shards() as folder, limits(*bounds):
        state = data.draw(states_of(array, folder))
        own = data.draw(slices_of(state, patterns(array.shape), state.dtype))
        gatherer = Gatherer(sources=Sources())
        for piece in resolve(own, Locator(state), own.start, own.stop):
            for part in ucp.transfer.gather._split_reads(in_file_order(piece)):
                lead, run = runs_of(part)
                assert math.prod(part.sizes[:lead]) * run <= max(stretch, state.dtype.itemsize)
        gatherer.sources.close()
