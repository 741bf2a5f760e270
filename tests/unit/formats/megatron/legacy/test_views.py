"""Views of stored tensors, against numpy doing the same to an array."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from ucp_formats.megatron.legacy.model import View, experts_in_one, old_attention_rows, plain
from ucp_patterns.shard import Shard

from ucp.core.dtypes import DType
from ucp.core.fragments import fragments
from ucp.core.layout import AxisLayout, Layout, local_shape
from ucp.core.tensor import TensorRef, contiguous_strides


def seen(view: View, stored: np.ndarray) -> np.ndarray:
    """The parameter, taken element by element out of the stored array."""
    flat, out = stored.ravel(), np.full(view.shape, -1)
    for piece in view.pieces:
        for index in product(*map(range, piece.box.sizes)):
            at = tuple(map(sum, zip(index, piece.box.offsets, strict=True)))
            out[at] = flat[piece.offset + sum(map(int.__mul__, index, piece.strides))]
    return out


@pytest.mark.parametrize("tail", [(), (5,)])
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(("version", "turned"), [(0, (0, 1)), (1.0, (1, 2)), (2.0, None), (3.0, None)])
def test_old_rows_are_put_in_order(tail: tuple[int, ...], parts: int, version: float, turned: tuple[int, int]) -> None:
    heads, dim = 4, 2
    wanted = np.arange(heads * parts * dim * 5).reshape(heads * parts * dim, -1)[:, : tail[0] if tail else 1]
    wanted = wanted.reshape(heads * parts * dim, *tail)
    stored = wanted
    if turned is not None:
        stored = wanted.reshape(heads, parts, dim, *tail).swapaxes(*turned).reshape(wanted.shape)
    view = old_attention_rows(stored.shape, heads=heads, parts=parts, version=version)
    assert np.array_equal(seen(view, np.ascontiguousarray(stored)), wanted)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 heads"):
        old_attention_rows((10, 2), heads=4, parts=3, version=0)


def test_experts_are_taken_apart() -> None:
    wanted = np.arange(24).reshape(2, 3, 4)  # experts, out, in
    stored = np.ascontiguousarray(wanted.transpose(0, 2, 1))
    views = experts_in_one((2, 3, 4), (12, 1, 3))
    assert all(np.array_equal(seen(view, stored), own) for view, own in zip(views, wanted, strict=True))


@pytest.mark.parametrize("version", [0, 1.0, 3.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_fragments_are_cut_out_of_a_view(version: float, rank: int) -> None:
    layout = Layout((AxisLayout("tp", 2, Shard(dim=0, blocks=(12, 12))),))
    local = local_shape(layout, (24, 3), {"tp": rank})
    view = old_attention_rows(local, heads=2, parts=3, version=version)
    stored = np.arange(36).reshape(local)
    canonical = seen(view, stored)
    ref = TensorRef(path="a", offset=16, dtype=DType.FLOAT32, shape=local, strides=contiguous_strides(local))
    out = np.full((24, 3), -1)
    for fragment in fragments(layout, (24, 3), [view.of(ref, {"tp": rank})]):
        flat = (fragment.ref.offset - 16) // 4
        for index in product(*map(range, fragment.box.sizes)):
            at = tuple(map(sum, zip(index, fragment.box.offsets, strict=True)))
            out[at] = stored.ravel()[flat + sum(map(int.__mul__, index, fragment.ref.strides))]
    parts = [out[0:12], out[12:24]]
    held = np.concatenate([part[rank * 6 : rank * 6 + 6] for part in parts])
    assert np.array_equal(held, canonical)
    assert (out != -1).sum() == 36


def test_a_number_is_a_view_too() -> None:
    ref = TensorRef(path="a", offset=0, dtype=DType.FLOAT32, shape=(), strides=())
    (fragment,) = fragments(Layout(), (), [plain(()).of(ref, {})])
    assert fragment.ref == ref
