"""A base and patches, of any source layout, read into any target slice: the bytes are those of the last version."""

from __future__ import annotations

import itertools
import struct
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard

import ucp.transfer.patches
from tests.strategies import random_array, shapes, slices_of, states_of
from ucp.core.gaps import check_cover
from ucp.core.index import Fragment, StateIndex
from ucp.core.layout import Overlap
from ucp.core.region import Box
from ucp.core.slices import Locator, resolve
from ucp.core.target import full_slice
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.errors import CorruptError, CoverError
from ucp.io.elements import numpy_dtype, viewed
from ucp.io.files import Sources
from ucp.testing.handmade import Shards, make_index
from ucp.transfer.gather import Gatherer
from ucp.transfer.patches import OVERWRITE, XOR

DTYPES = st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.INT64, DType.COMPLEX128, DType.UINT8])
CODECS = st.sampled_from([XOR, OVERWRITE])


def xor_frame(before: bytes, after: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(before, after, strict=True))


def overwrite_frame(before: bytes, after: bytes) -> bytes:
    changed = [(n, b) for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    return struct.pack(f"<I{len(changed)}I", len(changed), *(n for n, _ in changed)) + bytes(b for _, b in changed)


def put_patch(folder: Path, array: np.ndarray, raw: bytes, codec: str) -> TensorRef:
    """A frame of `raw`, after other bytes of a file, as a patch of a tensor like `array`."""
    frame = zstandard.ZstdCompressor(level=1).compress(raw)
    with (folder / "patches.bin").open("ab") as file:
        file.write(b"other")
        offset = file.tell()
        file.write(frame)
    return TensorRef(
        path=str(folder / "patches.bin"),
        offset=offset,
        dtype=DType(array.dtype.name),
        shape=array.shape,
        strides=contiguous_strides(array.shape),
        codec=codec,
        codec_nbytes=len(frame),
        patched_nbytes=array.nbytes,
    )


def patch_of(folder: Path, before: np.ndarray, after: np.ndarray, codec: str) -> TensorRef:
    encode = xor_frame if codec == XOR else overwrite_frame
    return put_patch(folder, after, encode(before.tobytes(), after.tobytes()), codec)


def patched(base: StateIndex, refs: list[TensorRef]) -> StateIndex:
    full = Box.full(base.global_shape)
    patches = (Fragment(box=full, ref=ref, term=term) for term, ref in enumerate(refs, 1))
    kept = (fragment for fragment in base.fragments if not fragment.replica)
    return replace(base, fragments=(*kept, *patches), overlap=Overlap.PATCHED)


def gather(state: StateIndex, start: int, stop: int, *, tensor_slice=None, dtype=None, gatherer=None) -> np.ndarray:
    tensor_slice = tensor_slice or full_slice("w", "weight", state, dtype=dtype)
    data = memoryview(bytearray(b"\xee" * ((stop - start) * tensor_slice.dtype.itemsize)))
    own = gatherer or Gatherer(sources=Sources())
    own.fill(data, tensor_slice.dtype, resolve(tensor_slice, Locator(state), start, stop))
    if gatherer is None:
        own.sources.close()
    return viewed(data, tensor_slice.dtype)


@contextmanager
def small_windows(nbytes: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ucp.transfer.patches, "WINDOW", 2 * nbytes)
        patch.setattr(ucp.transfer.patches, "_CHUNK", nbytes)
        patch.setattr(ucp.transfer.patches, "_POSITIONS", 3)
        patch.setattr(ucp.transfer.patches, "OPEN_PATCHES", 2)
        yield


@st.composite
def versions(draw, folder: Path):
    """A base and its patches as a state, and the last version."""
    array = random_array(draw(shapes()), draw(DTYPES), draw(st.integers(0, 1000)))
    state = draw(states_of(array, folder))
    refs = []
    for _ in range(draw(st.integers(1, 4))):
        raw = np.frombuffer(array.tobytes(), dtype=np.uint8).copy()
        for position in draw(st.lists(st.integers(0, max(raw.size - 1, 0)), max_size=8)) if raw.size else ():
            raw[position] = draw(st.integers(0, 255))
        after = np.frombuffer(raw.tobytes(), dtype=array.dtype).reshape(array.shape)
        refs.append(patch_of(folder.folder, array, after, draw(CODECS)))
        array = after
    return patched(state, refs), array


@given(st.data(), st.sampled_from([8, 1 << 17]))
def test_any_slice_has_the_bytes_of_the_last_version(data, chunk):
    with tempfile.TemporaryDirectory() as folder, small_windows(chunk):
        state, array = data.draw(versions(Shards(Path(folder))))
        check_cover(make_index(Path(folder), {("w", "weight"): state}))
        dim = data.draw(st.integers(0, max(array.ndim - 1, 0)))
        pattern = data.draw(st.sampled_from([Replicate(), Shard(dim)])) if array.ndim else Replicate()
        part = data.draw(slices_of(state, st.just(pattern), state.dtype))
        found = gather(state, part.start, part.stop, tensor_slice=part)
        local = np.zeros(part.local_shape, dtype=array.dtype)
        for pair in part.pairs:
            far, near = (
                (..., *(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))
                for box in (pair.global_box, pair.local)
            )
            local[near] = array[far]
        assert found.tobytes() == local.reshape(-1)[part.start : part.stop].tobytes()


@given(st.data())
def test_blocks_in_order_or_not_are_patched_alike(data):
    with tempfile.TemporaryDirectory() as folder, small_windows(8):
        state, array = data.draw(versions(Shards(Path(folder))))
        edges = sorted({0, array.size, *data.draw(st.lists(st.integers(0, array.size), max_size=5))})
        blocks = data.draw(st.permutations(list(itertools.pairwise(edges))))
        gatherer = Gatherer(sources=Sources())
        for low, high in blocks:
            found = gather(state, low, high, gatherer=gatherer)
            assert found.tobytes() == array.reshape(-1)[low:high].tobytes()
        gatherer.sources.close()


@pytest.mark.parametrize("codec", [XOR, OVERWRITE])
def test_a_cast_comes_after_the_patches(tmp_path, codec):
    before, after = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[1, 2, 1 + 2**-9], [4, 0.1, 6]])
    state = patched(Shards(tmp_path).whole(before), [patch_of(tmp_path, before, after, codec)])
    found = gather(state, 1, 6, dtype=DType.BFLOAT16)
    assert found.tobytes() == after.reshape(-1)[1:].astype(numpy_dtype(DType.BFLOAT16)).tobytes()


class TestDamage:
    @pytest.fixture
    def base(self, tmp_path):
        return Shards(tmp_path).whole(np.arange(8, dtype="f4"))

    def check(self, tmp_path, base, raw, codec, message):
        ref = put_patch(tmp_path, np.arange(8, dtype="f4"), raw, codec)
        with pytest.raises(CorruptError, match=message) as caught:
            gather(patched(base, [ref]), 0, 8)
        assert f"{ref.path}, bytes {ref.offset}:{ref.offset + ref.codec_nbytes}" in str(caught.value)

    @pytest.mark.parametrize(("nbytes", "message"), [(31, "ends at 31"), (33, "a longer one")])
    def test_a_patch_of_another_length_is_refused(self, tmp_path, base, nbytes, message):
        self.check(tmp_path, base, bytes(nbytes), XOR, message)

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            (struct.pack("<IIB", 1, 32, 7), "positions below 32"),
            (struct.pack("<IIIBB", 2, 9, 9, 7, 7), "increase"),
            (struct.pack("<IIIBB", 2, 9, 8, 7, 7), "increase"),
            (struct.pack("<IIIB", 2, 8, 9, 7), "ends at"),
            (struct.pack("<I", 1 << 31), "ends at"),
            (struct.pack("<IIBB", 1, 8, 7, 7), "a longer one"),
            (b"", "ends at 0"),
        ],
    )
    def test_a_list_of_changes_that_is_wrong_is_refused(self, tmp_path, base, raw, message):
        self.check(tmp_path, base, raw, OVERWRITE, message)

    @pytest.mark.parametrize("codec", [XOR, OVERWRITE])
    def test_a_frame_that_is_cut_or_none_is_refused(self, tmp_path, base, codec):
        ref = put_patch(tmp_path, np.arange(8, dtype="f4"), bytes(32), codec)
        for wrong in (replace(ref, codec_nbytes=ref.codec_nbytes - 4), replace(ref, offset=ref.offset - 2)):
            with pytest.raises(CorruptError):
                gather(patched(base, [wrong]), 0, 8)

    def test_a_base_with_a_hole_is_refused(self, tmp_path, base):
        before = np.arange(8, dtype="f4")
        state = patched(base, [patch_of(tmp_path, before, before + 1, XOR)])
        only_patch = replace(state, fragments=state.fragments[1:])
        with pytest.raises(CoverError):
            check_cover(make_index(tmp_path, {("w", "weight"): only_patch}))
        with pytest.raises(CoverError):
            gather(only_patch, 0, 8)
