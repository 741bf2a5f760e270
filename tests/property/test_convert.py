"""Any checkpoint, in any layout of the store and back: bytes, names, shapes and types are what they were."""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ucp_patterns.shard import Shard

import ucp
from tests.strategies import random_array, shapes, states_of
from ucp.core.index import Fragment, StateIndex
from ucp.core.region import Box, cut_flat_range
from ucp.core.slices import Locator, resolve
from ucp.core.target import full_slice
from ucp.core.tensor import DType
from ucp.io.files import Sources
from ucp.source.read import index_of
from ucp.testing.handmade import Shards, make_index, write_checkpoint
from ucp.transfer.gather import Gatherer

LAYOUTS = st.sampled_from([{}, {"layout": "per-parameter"}, {"compress": True}, {"virtual": True}])
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks of 64 bytes, tasks of 192; and no waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "transfer.plan.job",
            "transfer.worker",
            "transfer.compare",
            "conversion.prepare",
            "store.describe",
        ):
            module = import_module(f"ucp.{name}")
            if hasattr(module, "BLOCK"):
                patch.setattr(module, "BLOCK", 64)
        patch.setattr(import_module("ucp.transfer.plan.job"), "TASK", 192)
        patch.setattr(import_module("ucp.transfer.gather"), "MAX_READ", 48)
        patch.setattr(import_module("ucp.transfer.worker"), "MIN_JOINED", 2)
        patch.setattr(import_module("ucp.transfer.worker"), "TILE", 128)
        for name, nbytes in (("MIN_TILED", 100), ("CALL_BYTES", 8), ("GAP", 16)):
            patch.setattr(import_module("ucp.transfer.plan.tiles"), name, nbytes)
        patch.setattr(import_module("ucp.core.slices"), "GAP", 16)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@given(st.data(), LAYOUTS, LAYOUTS)
@settings(max_examples=25)
def test_there_and_back(data, first, second):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shards, arrays, states = Shards(root / "source"), {}, {}
        for name in data.draw(st.lists(NAMES, unique=True, max_size=3)):
            for state in ("weight", "row_moment"):  # of any shape, as those of Adafactor
                dtype = data.draw(st.sampled_from(list(DType)))
                array = random_array(data.draw(shapes(most=7)), dtype, data.draw(st.integers(0, 99)), bits=True)
                arrays[name, state] = array
                states[name, state] = data.draw(states_of(array, shards))
        index = make_index(shards.folder, states)
        refs = [f.ref for s in states.values() for f in s.fragments if f.path and f.ref.numel and f.ref.is_contiguous]
        records = [shards.record(ref) for ref in refs if data.draw(st.booleans())]
        write_checkpoint(make_index(shards.folder, states, records=records))
        ucp.convert(shards.folder, root / "one", workers=1, **first)
        ucp.convert(root / "one", root / "two", workers=1, **second)
        for path in (root / "one", root / "two"):
            found = index_of(path)
            assert list(found.atoms) == list(index.atoms)
            for (name, state), array in arrays.items():
                own = found.atoms[name].states[state]
                assert (own.dtype.value, own.global_shape) == (array.dtype.name, array.shape)
                assert read(own) == array.tobytes()
            assert ucp.verify(path, against=shards.folder).ok


def read(state: StateIndex) -> bytes:
    own = full_slice("p", "s", state)
    data = memoryview(bytearray(own.nbytes))
    gatherer = Gatherer(sources=Sources())
    gatherer.fill(data, own.dtype, resolve(own, Locator(state), 0, own.stop))
    gatherer.sources.close()
    return bytes(data)


@pytest.mark.parametrize("cut", ["whole", "flat", "columns", "rows"])
def test_every_source_byte_is_read_once(tmp_path, cut):
    """Except where pieces are strided, which is when gaps are read along."""
    array = np.arange(60 * 50, dtype="float32").reshape(60, 50)
    shards = Shards(tmp_path / "source")
    if cut == "flat":
        edges = [0, 700, 701, 1999, 3000]
        boxes = [box for low, high in pairwise(edges) for box in cut_flat_range(array.shape, low, high)]
    elif cut == "whole":
        boxes = [Box.full(array.shape)]
    else:
        pattern = Shard(1 if cut == "columns" else 0)
        boxes = [pair.global_box for index in range(4) for pair in pattern.regions(array.shape, 4, index)]
    fragments = []
    for box in boxes:
        part = array[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        fragments.append(Fragment(box=box, ref=shards.put(part)))
    state = StateIndex(dtype=DType.FLOAT32, global_shape=array.shape, fragments=tuple(fragments))
    records = [shards.record(fragment.ref) for fragment in fragments]
    write_checkpoint(make_index(shards.folder, {("w", "weight"): state}, records=records))
    report = ucp.convert(shards.folder, tmp_path / "out", workers=1)
    assert report.checked_bytes == array.nbytes
    assert ucp.verify(tmp_path / "out", against=shards.folder).ok
