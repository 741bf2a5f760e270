"""Layouts over tensor-parallel ranks against numpy: what ranks hold, lifted to the whole, is the whole."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from ucp_formats.deepspeed.tp.layout import TensorLayout, TensorShapes, affine_layout, cut_layout
from ucp_formats.deepspeed.tp.universal_info import UniversalCheckpointInfo, recorded_layouts
from ucp_patterns.chunk import Chunk

from ucp.core.index import Fragment
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box
from ucp.core.tensor import DType, TensorRef
from ucp.core.union import StoredShard, place_fragments

Whole = NDArray[np.int64]


def numbers(shape: tuple[int, ...]) -> Whole:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def united(layout: TensorLayout, held: list[Whole], dp: int) -> Whole:
    """The whole, from the pieces of copy 0, of tensors that ZeRO-3 cut over `dp`; every copy is checked against it."""
    every = Layout((AxisLayout("tp", layout.parts, layout.pattern),), (AxisLayout("dp", dp, Chunk(0)),))
    whole = np.full(layout.global_shape, -1, dtype=np.int64)
    files: dict[str, Whole] = {}
    stored = []
    for tp, part in enumerate(held):
        for rank, own in enumerate(chunks(part, dp)):
            files[f"{tp}.{rank}"] = own
            ref = TensorRef(path=f"{tp}.{rank}", offset=0, dtype=DType.INT64, shape=own.shape, strides=(1,))
            stored.append(StoredShard({"tp": tp, "dp": rank}, ref))
    pieces = place_fragments(every, layout.global_shape, stored)
    for own in pieces:
        if own.replica == 0:
            whole[slices(own.box)] = elements(own, files)
    for own in pieces:
        np.testing.assert_array_equal(whole[slices(own.box)], elements(own, files))
    return whole


def chunks(local: Whole, dp: int) -> list[Whole]:
    """A rank's tensor as ZeRO-3 stores it: flat, in parts of ceil(elements / ranks), the last ones padded."""
    each = -(-local.size // dp)
    padded = np.concatenate([local.ravel(), np.full(each * dp - local.size, -7)])
    return [padded[rank * each : (rank + 1) * each] for rank in range(dp)]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))


def elements(piece: Fragment, files: dict[str, Whole]) -> Whole:
    assert isinstance(piece.ref, TensorRef)
    strides = tuple(8 * step for step in piece.ref.strides)
    return np.ndarray(piece.ref.shape, np.int64, files[piece.ref.path].tobytes(), piece.ref.offset, strides)


ranks_of_dp = st.integers(1, 5)


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 1]), ranks_of_dp)
def test_blocks_of_any_widths(data, parts: int, blocks: int, dim: int, dp: int) -> None:
    widths = [[data.draw(st.integers(0, 3)) for _ in range(parts)] for _ in range(blocks)]
    shape = (sum(map(sum, widths)), 3) if dim == 0 else (3, sum(map(sum, widths)))
    whole = numbers(shape)
    at, held = 0, [[] for _ in range(parts)]  # type: ignore[var-annotated]
    for block in widths:
        for rank, width in enumerate(block):
            held[rank].append(whole.take(range(at, at + width), axis=dim))
            at += width
    ranks = [np.concatenate(own, axis=dim) for own in held]
    layout = cut_layout(dim, [own.shape for own in ranks], widths)
    assert layout.global_shape == shape
    np.testing.assert_array_equal(united(layout, ranks, dp), whole)


@given(st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=2), min_size=2, max_size=3), st.sampled_from([0, 1]))
def test_recorded_blocks_add_up_to_the_shape(widths: list[list[int]], dim: int) -> None:
    """DeepSpeed's `SubparamShape` has the sizes of the blocks in place of the dim that is cut."""
    lengths = [sum(block[rank] for block in widths) for rank in range(2)]
    layout = cut_layout(dim, [(n, 5) if dim == 0 else (5, n) for n in lengths], widths)
    (entry,) = recorded_layouts({"w": layout})["parameter_with_sub_params"]  # type: ignore[misc]
    assert entry["partition_dim"] == dim
    assert entry["shape"][dim] == tuple(map(sum, widths))
    assert entry["shape"][1 - dim] == 5


def piece(shape: tuple[int, ...], source: tuple[int, list[int]], dest: tuple[int, list[int]]) -> dict[str, object]:
    return {"shape": list(shape), "source": list(source), "dest": list(dest), "locations": [0]}


def affine(logical: tuple[int, ...], ranks: list[tuple[tuple[int, ...], list[dict[str, object]]]]) -> dict[str, object]:
    saved = {rank: {"shard_shape": list(shape), "pieces": own} for rank, (shape, own) in enumerate(ranks)}
    return {"logical_shape": list(logical), "ranks": saved}


@given(st.permutations(range(6)), st.integers(1, 3), st.integers(1, 4), ranks_of_dp)
def test_heads_gathered_in_any_order(order: list[int], parts: int, width: int, dp: int) -> None:
    """Each rank has some blocks of rows, in an order of its own, as `block_gather_map` of 0.19.8 writes them."""
    columns = 3
    whole = numbers((6 * width, columns))
    own = [order[rank::parts] for rank in range(parts)]
    held = [np.concatenate([whole[b * width : (b + 1) * width] for b in blocks]) for blocks in own]
    pieces = [
        [
            piece((width, columns), (b * width * columns, [columns, 1]), (at * width * columns, [columns, 1]))
            for at, b in enumerate(blocks)
        ]
        for blocks in own
    ]
    saved = affine(whole.shape, [(part.shape, rank) for part, rank in zip(held, pieces, strict=True)])
    layout = affine_layout(saved, [part.shape for part in held], "x")
    np.testing.assert_array_equal(united(layout, held, dp), whole)


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4]), ranks_of_dp)
def test_pieces_of_more_dims_than_the_tensor(heads: int, width: int, parts: int, dp: int) -> None:
    """q, k and v of each head one after another, `heads` of them on every rank; a piece is [heads, width, columns]."""
    columns = 2
    whole = numbers((parts * heads * 3 * width, columns))
    viewed = whole.reshape(parts * heads, 3, width, columns)
    row = width * columns
    held, ranks = [], []
    for rank in range(parts):
        own = viewed[rank * heads : (rank + 1) * heads].transpose(1, 0, 2, 3)
        held.append(np.ascontiguousarray(own).reshape(3 * heads * width, columns))
        pieces = [
            piece(
                (heads, width, columns),
                ((rank * heads * 3 + part) * row, [3 * row, columns, 1]),
                (part * heads * row, [row, columns, 1]),
            )
            for part in range(3)
        ]
        ranks.append((held[-1].shape, pieces))
    layout = affine_layout(affine(whole.shape, ranks), [part.shape for part in held], "x")
    np.testing.assert_array_equal(united(layout, held, dp), whole)


@given(st.integers(2, 4), ranks_of_dp)
def test_blocks_that_ranks_share(parts: int, dp: int) -> None:
    """Query heads are cut; the one key head is on every rank (multi-query attention)."""
    whole, rows = numbers((2 * parts + 1, 3)), [3, 1]
    held = [np.concatenate([whole[2 * rank : 2 * rank + 2], whole[-1:]]) for rank in range(parts)]
    ranks = [
        (part.shape, [piece((2, 3), (6 * rank, rows), (0, rows)), piece((1, 3), (6 * parts, rows), (6, rows))])
        for rank, part in enumerate(held)
    ]
    layout = affine_layout(affine(whole.shape, ranks), [part.shape for part in held], "x")
    assert layout.pattern.name.startswith("pieces")
    np.testing.assert_array_equal(united(layout, held, dp), whole)


@given(st.integers(1, 4), st.sampled_from([0.1, 0.4]))
def test_fused_weights_of_every_version(parts: int, version: float) -> None:
    sizes = (2 * parts, parts, parts)
    info: dict[object, object] = {
        "universal_checkpoint_version": version,
        "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": (sizes, -1), "partition_dim": 0}],
        "sub_param_shard_widths": {"qkv": [[size // parts] * parts for size in sizes]} if version >= 0.4 else None,
    }
    shapes = TensorShapes(local=((4, 3),) * parts)
    layout = UniversalCheckpointInfo(info, "x").layouts({"qkv.weight": shapes})["qkv.weight"]
    whole = numbers((4 * parts, 3))
    q, k, v = np.split(whole, [2 * parts, 3 * parts])
    held = [np.concatenate([q[2 * r : 2 * r + 2], k[r : r + 1], v[r : r + 1]]) for r in range(parts)]
    np.testing.assert_array_equal(united(layout, held, 1), whole)
