"""Atoms looked at under the names of a target that joins them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ucp.core.dtypes import DType
from ucp.core.fragments import Fragment
from ucp.core.fused_names import Stretch, joined
from ucp.core.index import StateIndex, check_cover
from ucp.core.region import Box
from ucp.core.slices import Locator, resolve, whole_slice
from ucp.errors import CoverError
from ucp.io.codec import codec_name, encode
from ucp.io.elements import viewed
from ucp.testing.handmade import Shards, inline, make_index
from ucp.transfer.gather import Gatherer, Sources

Q, K = np.arange(32, dtype=np.float32).reshape(8, 4), 100 + np.arange(16, dtype=np.float32).reshape(4, 4)
TURNS = np.concatenate([Q[:4], K[:2], Q[4:], K[2:]])
"""Two groups: a half of each in every turn."""


def stretches() -> tuple[Stretch, ...]:
    places = [("q", 0, 0, 4), ("k", 4, 0, 2), ("q", 6, 4, 4), ("k", 10, 2, 2)]
    return tuple(
        Stretch(atom=atom, whole=Box((whole, 0), (rows, 4)), local=Box((local, 0), (rows, 4)))
        for atom, whole, local, rows in places
    )


def cut(shards: Shards, array: np.ndarray, how: str) -> StateIndex:
    """`array` in pieces that do not end where the turns do."""
    if how == "codec":
        ref = shards.put(array)
        data = encode(memoryview(array.tobytes()), 4)
        path = shards.folder / f"{ref.offset}.zst"
        path.write_bytes(data)
        ref = replace(ref, path=str(path), offset=0, codec=codec_name(4), codec_nbytes=len(data))
        pieces = [(0, 0, ref)]
    elif how == "columns":
        pieces = [(0, low, shards.put(np.ascontiguousarray(array[:, low : low + 2]))) for low in (0, 2)]
    elif how == "inline":
        pieces = [(low, 0, inline(array[low : low + 3])) for low in range(0, len(array), 3)]
    else:
        pieces = [(low, 0, shards.put(array[low : low + 3])) for low in range(0, len(array), 3)]
    fragments = [Fragment(box=Box((row, column), ref.shape), ref=ref) for row, column, ref in pieces]
    return StateIndex(dtype=DType.FLOAT32, global_shape=array.shape, fragments=tuple(fragments))


def read(state: StateIndex) -> np.ndarray:
    gatherer, own = Gatherer(sources=Sources()), whole_slice("p", "s", state)
    data = memoryview(bytearray(own.nbytes))
    gatherer.fill(data, own.dtype, resolve(own, Locator(state), 0, own.stop))
    gatherer.sources.close()
    return viewed(data, own.dtype).reshape(state.global_shape)


@pytest.mark.parametrize("how", ["rows", "columns", "inline", "codec"])
def test_pieces_are_brought_to_their_places(tmp_path: Path, how: str) -> None:
    shards = Shards(tmp_path)
    index = make_index(
        tmp_path,
        {
            ("q", "weight"): cut(shards, Q, how),
            ("q", "exp_avg"): cut(shards, Q * 2, how),
            ("q", "step"): shards.whole(np.float32(3)),
            ("k", "weight"): cut(shards, K, how),
            ("k", "exp_avg"): cut(shards, K * 2, how),
            ("k", "step"): shards.whole(np.float32(3)),
            ("norm", "weight"): cut(shards, Q, "rows"),
        },
    )
    found = joined(index, {"qkv": stretches()})
    check_cover(found)
    assert list(found.atoms) == ["qkv", "norm"]
    assert found.atoms["qkv"].global_shape == (12, 4)
    assert np.array_equal(read(found.atoms["qkv"].states["weight"]), TURNS)
    assert np.array_equal(read(found.atoms["qkv"].states["exp_avg"]), TURNS * 2)
    assert read(found.atoms["qkv"].states["step"]) == 3
    assert found.atoms["norm"] == index.atoms["norm"]


def test_what_a_part_lacks_the_joined_tensor_lacks(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    states = {("q", "weight"): cut(shards, Q, "rows"), ("q", "exp_avg"): cut(shards, Q, "rows")}
    index = make_index(tmp_path, {**states, ("k", "weight"): cut(shards, K, "rows")})
    assert list(joined(index, {"qkv": stretches()}).atoms["qkv"].states) == ["weight"]


def test_a_hole_stays_one(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    own = cut(shards, Q, "rows")
    holed = replace(own, fragments=own.fragments[:-1])
    index = make_index(tmp_path, {("q", "weight"): holed, ("k", "weight"): cut(shards, K, "rows")})
    with pytest.raises(CoverError, match="qkv"):
        check_cover(joined(index, {"qkv": stretches()}))
