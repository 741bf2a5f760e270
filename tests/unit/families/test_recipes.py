"""Tensors joined, split, transposed and permuted by reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ucp_patterns.shard import Shard

from ucp.core.gaps import check_cover
from ucp.core.index import Fragment, ParamGroup, StateIndex
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box, RegionPair
from ucp.core.slices import Locator, resolve
from ucp.core.target import full_slice
from ucp.core.tensor import DType
from ucp.errors import CoverError, MissingStateError, UnsupportedError
from ucp.families.recipes import TensorRecipe, apply_recipes, permute_view
from ucp.io.elements import codec_name, encode_block, viewed
from ucp.io.files import Sources
from ucp.testing.handmade import Shards, inline, make_index
from ucp.transfer.gather import Gatherer

Q, K = np.arange(32, dtype=np.float32).reshape(8, 4), 100 + np.arange(16, dtype=np.float32).reshape(4, 4)
TURNS = np.concatenate([Q[:4], K[:2], Q[4:], K[2:]])
"""Two groups: a half of each in every turn."""


def joined() -> TensorRecipe:
    places = [("q", 0, 0, 4), ("k", 4, 0, 2), ("q", 6, 4, 4), ("k", 10, 2, 2)]
    patches = (
        RegionPair.strided(Box((to, 0), (rows, 4)), atom, (at, 0), (0, 1), (1, 1)) for atom, to, at, rows in places
    )
    return TensorRecipe((12, 4), tuple(patches))


def cut(shards: Shards, array: np.ndarray, how: str) -> StateIndex:
    """`array` in pieces that do not end where the turns do."""
    if how == "codec":
        ref = shards.put(array)
        data = encode_block(memoryview(array.tobytes()), 4)
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
    gatherer, own = Gatherer(sources=Sources()), full_slice("p", "s", state)
    data = memoryview(bytearray(own.nbytes))
    gatherer.fill(data, own.dtype, resolve(own, Locator(state), 0, own.stop))
    gatherer.sources.close()
    return viewed(data, own.dtype).reshape(state.global_shape)


HOW = pytest.mark.parametrize("how", ["rows", "columns", "inline", "codec"])


@HOW
def test_parts_are_brought_to_their_places(tmp_path: Path, how: str) -> None:
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
    index = replace(index, groups=(ParamGroup(params=("norm", "k", "q"), hyper={"lr": 1}),))
    found = apply_recipes(index, {"qkv": joined(), "ln": TensorRecipe.identity("norm", (8, 4))})
    check_cover(found)
    assert list(found.atoms) == ["qkv", "ln"]
    assert found.groups[0].params == ("ln", "qkv")
    assert found.atoms["qkv"].global_shape == (12, 4)
    assert np.array_equal(read(found.atoms["qkv"].states["weight"]), TURNS)
    assert np.array_equal(read(found.atoms["qkv"].states["exp_avg"]), TURNS * 2)
    assert read(found.atoms["qkv"].states["step"]) == 3
    assert found.atoms["ln"] == replace(index.atoms["norm"], name="ln")


def test_a_joined_tensor_knows_how_its_parts_lay(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    index = make_index(tmp_path, {(name, "weight"): cut(shards, own, "rows") for name, own in (("q", Q), ("k", K))})
    layout = Layout((AxisLayout("tp", 2, Shard(0), "family llama"),))
    index.atoms["q"] = replace(index.atoms["q"], layout=layout)
    atom = apply_recipes(index, {"qkv": joined()}).atoms["qkv"]
    assert (atom.layout, atom.made_of) == (Layout(), {"q": layout})
    again = apply_recipes(
        replace(index, atoms={"qkv": atom}), {"turned": permute_view("qkv", (12, 4), (12, 4), (1, 0), 2)}
    )
    assert again.atoms["turned"].made_of == {"q": layout}


@HOW
def test_a_matrix_is_transposed_and_its_rows_are_permuted(tmp_path: Path, how: str) -> None:
    shards = Shards(tmp_path)
    index = make_index(tmp_path, {("q", "weight"): cut(shards, Q, how)})
    turned = permute_view("q", (8, 4), (8, 4), (1, 0), 2)
    pairs = permute_view("q", (8, 4), (2, 2, 2, 4), (0, 2, 1, 3), 2)
    found = apply_recipes(index, {"turned": turned})
    check_cover(found)
    assert np.array_equal(read(found.atoms["turned"].states["weight"]), Q.T)
    found = apply_recipes(index, {"pairs": pairs})
    check_cover(found)
    wanted = Q.reshape(2, 2, 2, 4).transpose(0, 2, 1, 3).reshape(8, 4)
    assert np.array_equal(read(found.atoms["pairs"].states["weight"]), wanted)


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """A shape, its dims taken apart, an order of these, and how many dims are left."""
    view = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    cuts = sorted({0, len(view), *draw(st.lists(st.integers(1, len(view)), max_size=3))})
    shape = tuple(prod(view[low:high]) for low, high in pairwise(cuts))
    order = draw(st.sampled_from(list(permutations(range(len(view))))))
    return shape, view, order, draw(st.integers(1, len(view)))


def filled(made: TensorRecipe, array: np.ndarray) -> np.ndarray:
    """What patches take of one array, each of their elements once."""
    target = np.full(made.shape, -1, dtype=array.dtype)
    for patch in made.patches:
        for at in np.ndindex(patch.local.sizes):
            place = list(patch.global_box.offsets)
            for number, (dim, step) in zip(at, patch.dim_steps, strict=True):
                if dim is not None:
                    place[dim] += number * step
            spot = tuple(map(int.__add__, patch.local.offsets, at))
            assert target[spot] == -1
            target[spot] = array[tuple(place)]
    return target


@given(views())
def test_views_are_those_of_numpy(own: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]) -> None:
    shape, view, order, rank = own
    array = np.arange(prod(shape)).reshape(shape)
    try:
        made = permute_view("w", shape, view, order, rank)
    except ValueError:  # a dim of one element may stand on either side of a cut
        assert 1 in view or 1 in shape
        return
    ordered = array.reshape(view).transpose(order)
    lead = len(view) - rank + 1
    assert np.array_equal(filled(made, array), ordered.reshape(prod(ordered.shape[:lead]), *ordered.shape[lead:]))


@given(views(), st.data())
def test_a_patch_after_another_is_both(
    own: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int], data: st.DataObject
) -> None:
    shape, view, order, rank = own
    if 1 in view:
        return
    first = permute_view("w", shape, view, order, rank)
    again = tuple(data.draw(st.permutations(range(len(first.shape)))))
    then = permute_view("v", first.shape, first.shape, again, len(first.shape))
    both = [found for patch in then.patches for own in first.patches if (found := patch.after(own)) is not None]
    array = np.arange(prod(shape)).reshape(shape)
    wanted = filled(first, array).transpose(again)
    assert np.array_equal(filled(TensorRecipe(then.shape, tuple(both)), array), wanted)


def test_what_does_not_go_together(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    q, k = cut(shards, Q, "rows"), cut(shards, K, "rows")
    lacking = make_index(tmp_path, {("q", "weight"): q, ("q", "exp_avg"): q, ("k", "weight"): k})
    with pytest.raises(MissingStateError, match=r"q .*weight, exp_avg .*k with weight:"):
        apply_recipes(lacking, {"qkv": joined()})
    index = make_index(tmp_path, {("q", "weight"): q, ("k", "weight"): k})
    apart = replace(index, groups=(ParamGroup(params=("q",), hyper={}), ParamGroup(params=("k",), hyper={})))
    with pytest.raises(UnsupportedError, match=r"parameter groups .*: q, k"):
        apply_recipes(apart, {"qkv": joined()})
    half = replace(k, dtype=DType.BFLOAT16)
    with pytest.raises(UnsupportedError, match=r"q and k, .*bfloat16"):
        apply_recipes(make_index(tmp_path, {("q", "weight"): q, ("k", "weight"): half}), {"qkv": joined()})
    flat = make_index(tmp_path, {("q", "weight"): q, ("q", "row"): cut(shards, Q[:, :3], "rows")})
    with pytest.raises(UnsupportedError, match=r"q, .*--exclude '\*/row'"):
        apply_recipes(flat, {"turned": permute_view("q", (8, 4), (8, 4), (1, 0), 2)})


def test_no_element_is_lost_or_taken_twice(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    index = make_index(tmp_path, {("q", "weight"): cut(shards, Q, "rows"), ("k", "weight"): cut(shards, K, "rows")})
    half = TensorRecipe((4, 4), (RegionPair.strided(Box((0, 0), (4, 4)), "q", (0, 0), (0, 1), (1, 1)),))
    for made, facts in (
        ({"a": half}, "q: 16 of its 32 "),
        ({"a": half, "b": half, "c": half}, "q: 48 of its 32 "),
        ({"a": TensorRecipe((12, 4), joined().patches[:3])}, r"a \[12, 4\]: q, k "),
    ):
        with pytest.raises(UnsupportedError, match=facts):
            apply_recipes(index, made)


def test_a_hole_stays_one(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    own = cut(shards, Q, "rows")
    holed = replace(own, fragments=own.fragments[:-1])
    index = make_index(tmp_path, {("q", "weight"): holed, ("k", "weight"): cut(shards, K, "rows")})
    with pytest.raises(CoverError, match="qkv"):
        check_cover(apply_recipes(index, {"qkv": joined()}))
