"""Differences are counted in bits, measured in values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import random_array, shapes
from ucp.core.tensor import DType
from ucp.io.elements import assign, differing, mean_dtype, numpy_dtype

DTYPES = st.sampled_from(list(DType))


@given(DTYPES, shapes(most=5), st.integers(0, 99), st.data())
def test_bits_that_differ_are_counted(dtype, shape, seed, data):
    a = random_array(shape, dtype, seed, bits=True)
    b = a.copy()
    raw = b.reshape(-1).view(np.uint8) if b.size else np.zeros(0, np.uint8)
    for at in data.draw(st.sets(st.integers(0, max(0, raw.size - 1)), max_size=4)) if raw.size else ():
        raw[at] ^= 1
    b = raw.view(numpy_dtype(dtype)).reshape(shape) if b.size else b
    where = [n for n, (x, y) in enumerate(zip(_items(a), _items(b), strict=True)) if x != y]
    found = differing(a, b)
    if not where:
        assert found is None
    else:
        assert (found.numel, found.first) == (len(where), where[0])
        assert math.isnan(found.largest) or found.largest >= 0


def _items(array: np.ndarray) -> list[bytes]:
    data, item = array.tobytes(), array.dtype.itemsize
    return [data[n : n + item] for n in range(0, len(data), item)]


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [([1.0, 2.0, 3.0], [1.0, 2.5, 1.0], 2.0), ([0.0], [-0.0], 0.0), ([np.nan, 1.0], [1.0, 1.0], np.nan)],
)
def test_the_largest_difference_is_one_of_values(a, b, largest):
    found = differing(np.float32(a), np.float32(b))
    assert found.largest == largest or (math.isnan(found.largest) and math.isnan(largest))


def test_equal_nans_do_not_differ():
    nan = np.frombuffer(b"\x01\x00\xc0\x7f", dtype=np.float32)
    assert differing(nan, nan.copy()) is None
    assert differing(nan, np.float32([np.nan])).numel == 1


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_floating])
def test_assigning_casts_without_a_warning(dtype):
    target = np.zeros(3, dtype=numpy_dtype(dtype))
    assign(target, np.float64([1e300, np.nan, 1.5]))
    assert target[2] == np.float64(1.5) or dtype is DType.FLOAT8_E5M2


def test_means_are_summed_without_losing_digits():
    assert mean_dtype([DType.FLOAT16, DType.FLOAT32]) is DType.FLOAT32
    assert mean_dtype([DType.FLOAT32, DType.FLOAT64]) is DType.FLOAT64
    assert mean_dtype([DType.COMPLEX64]) is DType.COMPLEX128
