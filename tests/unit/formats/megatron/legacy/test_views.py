"""Views of stored tensors, against numpy doing the same to an array."""

from __future__ import annotations

from itertools import product

import numpy as np
from ucp_formats.megatron.legacy.model import View

from ucp.core.layout import Layout
from ucp.core.tensor import DType, TensorRef
from ucp.core.union import place_fragments


def test_an_expert_is_seen_in_the_tensor_of_all() -> None:
    stored = np.ascontiguousarray(np.arange(24).reshape(2, 3, 4).transpose(0, 2, 1))  # experts, in, out
    view = View(shape=(3, 4), offset=12, strides=(1, 3))
    seen = np.array([stored.ravel()[12 + i + 3 * j] for i, j in product(range(3), range(4))]).reshape(3, 4)
    assert np.array_equal(seen, np.arange(24).reshape(2, 3, 4)[1])
    ref = TensorRef(path="a", offset=0, dtype=DType.FLOAT32, shape=(24,), strides=(1,))
    (fragment,) = place_fragments(Layout(), (3, 4), [view.of(ref, {})])
    assert (fragment.ref.offset, fragment.ref.shape, fragment.ref.strides) == (48, (3, 4), (1, 3))


def test_a_number_is_a_view_too() -> None:
    ref = TensorRef(path="a", offset=0, dtype=DType.FLOAT32, shape=(), strides=())
    (fragment,) = place_fragments(Layout(), (), [View.plain(()).of(ref, {})])
    assert fragment.ref == ref
