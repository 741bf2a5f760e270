"""Views of stored tensors, against numpy doing the same to an array."""

from __future__ import annotations

from itertools import product

import numpy as np
from ucp_formats.megatron.legacy.model import RankParam, Slot

from ucp.core.tensor import DType, TensorRef
from ucp.families.rule import Elements


def test_an_expert_is_seen_in_the_tensor_of_all() -> None:
    stored = np.ascontiguousarray(np.arange(24).reshape(2, 3, 4).transpose(0, 2, 1))  # experts, in, out
    seen = np.array([stored.ravel()[12 + i + 3 * j] for i, j in product(range(3), range(4))]).reshape(3, 4)
    assert np.array_equal(seen, np.arange(24).reshape(2, 3, 4)[1])
    ref = TensorRef(path="a", offset=0, dtype=DType.FLOAT32, shape=(24,), strides=(1,))
    param = RankParam(slot=Slot(0, 0, "key"), name="name", ref=ref, elements=Elements((3, 4), (1, 3)), offset=12)
    view = param.view(ref)
    assert (view.offset, view.shape, view.strides) == (48, (3, 4), (1, 3))
