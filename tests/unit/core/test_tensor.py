from __future__ import annotations

import pytest

from ucp.core.index import Fragment
from ucp.core.region import Box
from ucp.core.tensor import DType, InlineTensor, TensorRef


def ref(shape, strides, **more):
    return TensorRef(path="f", offset=0, dtype=DType.FLOAT32, shape=shape, strides=strides, **more)


@pytest.mark.parametrize(
    ("shape", "strides", "nbytes", "extent", "contiguous"),
    [
        ((2, 3), (3, 1), 24, 24, True),
        ((2, 3), (1, 2), 24, 24, False),
        ((2, 3), (6, 2), 24, 44, False),
        ((2, 3), (0, 1), 24, 12, False),
        ((1, 3), (99, 1), 12, 12, True),
        ((), (), 4, 4, True),
        ((0, 3), (3, 1), 0, 0, True),
        ((0, 3), (9, 9), 0, 0, True),
    ],
)
def test_bytes_of_a_reference(shape, strides, nbytes, extent, contiguous):
    found = ref(shape, strides)
    assert (found.nbytes, found.extent, found.is_contiguous) == (nbytes, extent, contiguous)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (2,), (1, 1)), (0, (-1,), (1,)), (0, (2,), (-1,)), (-1, (), ())],
    ids=["dims", "shape", "strides", "offset"],
)
def test_an_invalid_reference_cannot_exist(offset, shape, strides):
    with pytest.raises(ValueError, match=rf"TensorRef\(path='f', offset={offset}, "):
        TensorRef(path="f", offset=offset, dtype=DType.INT8, shape=shape, strides=strides)


def test_a_tensor_in_the_index_has_the_bytes_of_its_shape():
    assert InlineTensor(data=bytes(8), dtype=DType.INT64).nbytes == 8
    with pytest.raises(ValueError, match=r"7 bytes .*\(\) of int64"):
        InlineTensor(data=bytes(7), dtype=DType.INT64)


def test_a_fragment_has_the_shape_of_its_box():
    with pytest.raises(ValueError, match=r"\(2,\) .*\(3,\)"):
        Fragment(box=Box((0,), (3,)), ref=ref((2,), (1,)))
    assert Fragment(box=Box((), ()), ref=InlineTensor(data=bytes(8), dtype=DType.INT64)).path is None
