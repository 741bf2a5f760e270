"""Whatever is done to a manifest, reading the store gives an index or a UcpError; damaged text is always found."""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucp
from tests.fuzz.contents import edit_json
from ucp.core.index import Extra, Fragment, ParamGroup, StateIndex
from ucp.core.region import Box
from ucp.core.tensor import DType
from ucp.errors import MalformedError, UcpError
from ucp.store.format import StoreFormat
from ucp.testing.handmade import Shards, inline, make_index, write_checkpoint

KINDS = ("packed", "compressed", "virtual")


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    shards = Shards(folder / "source")
    rows = np.arange(12, dtype="float32").reshape(4, 3)
    pieces = [
        Fragment(box=Box((0, 0), (2, 3)), ref=shards.put(rows[:2], order=(1, 0))),
        Fragment(box=Box((2, 0), (1, 3)), ref=inline(rows[2:3])),
        Fragment(box=Box((3, 0), (1, 3)), ref=shards.put(rows[3:])),
        Fragment(box=Box((0, 0), (4, 3)), ref=shards.put(rows), replica=1),
    ]
    states = {
        ("w", "weight"): StateIndex(dtype=DType.FLOAT32, global_shape=(4, 3), fragments=tuple(pieces)),
        ("w", "step"): shards.whole(np.float32(3).reshape(())),
        ("b", "weight"): shards.whole(np.zeros((0, 2), dtype="float16")),
    }
    groups = [ParamGroup(params=("w", "b"), hyper={"lr": 0.1, "betas": (0.9, 0.95)})]
    record = shards.record(pieces[2].ref)
    index = make_index(shards.folder, states, groups=groups, records=[record], extras=[Extra(name="e", value=(1, 2))])
    write_checkpoint(index)
    ucp.convert(shards.folder, folder / "packed")
    ucp.convert(shards.folder, folder / "compressed", compress=True)
    ucp.convert(shards.folder, folder / "virtual", virtual=True)
    return {kind: folder / kind for kind in KINDS}


def read(root: Path, text: bytes) -> None:
    """Read the store with another manifest, in every way there is; UcpError is what may be raised."""
    path = root / "ucp.json"
    whole = path.read_bytes()
    path.write_bytes(text)
    try:
        ucp.open(root)
        ucp.verify(root)
        ucp.plan(root)
    finally:
        path.write_bytes(whole)


@given(st.sampled_from(KINDS), st.data())
def test_a_flipped_bit_is_always_found(stores, kind, data):
    text = bytearray((stores[kind] / "ucp.json").read_bytes())
    seal = text.rindex(b',"xxh3":"')
    at = data.draw(st.integers(0, seal - 1))
    text[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(UcpError):
        read(stores[kind], bytes(text))


@given(st.sampled_from(KINDS), st.data())
def test_a_cut_is_always_found(stores, kind, data):
    text = (stores[kind] / "ucp.json").read_bytes()
    with pytest.raises(MalformedError):
        read(stores[kind], text[: data.draw(st.integers(0, len(text) - 3))])


@given(st.sampled_from(KINDS), st.integers(0, 1 << 30))
def test_any_edit_is_an_index_or_an_expected_error(stores, kind, seed):
    """Values edited as the fuzz does it, the digest of the manifest taken away."""
    path, rng = stores[kind] / "ucp.json", Random(seed)
    whole = path.read_bytes()
    try:
        for _ in range(rng.randint(1, 3)):
            edit_json(path, rng)
        text = path.read_bytes()
    finally:
        path.write_bytes(whole)
    with contextlib.suppress(UcpError):
        read(stores[kind], text)


@pytest.mark.parametrize("file", ["/etc/hostname", "../../x.json", "extra/../../x.json", "extra/missing.json", 3, None])
def test_an_extra_stays_below_the_store(stores, file):
    document = json.loads((stores["packed"] / "ucp.json").read_bytes())
    document["extras"] = [{"name": "e", "rank": None, "file": file}]
    del document["xxh3"]
    with pytest.raises(MalformedError, match="extra"):
        read(stores["packed"], json.dumps(document).encode())


def test_an_extra_that_is_damaged_is_named(stores):
    document = json.loads((stores["packed"] / "ucp.json").read_bytes())
    del document["xxh3"]
    extra = stores["packed"] / "extra" / "e.json"
    extra.parent.mkdir(exist_ok=True)
    for text in (b"", b"{", b'{"!tuple": 1}', b"\xff", b"[" * 100_000):
        sums = {"nbytes": len(text), "crc32": zlib.crc32(text)}
        document["extras"] = [{"name": "e", "rank": None, "file": "extra/e.json", **sums}]
        extra.write_bytes(text)
        with pytest.raises(MalformedError, match=r"e\.json"):
            read(stores["packed"], json.dumps(document).encode())


def test_reading_an_index_does_not_believe_a_number_of_blocks(stores):
    document = json.loads((stores["compressed"] / "ucp.json").read_bytes())
    del document["xxh3"]
    document["atoms"]["w"]["states"]["weight"]["blocks"].append([0, 10])
    with pytest.raises(MalformedError, match="2 blocks"):
        read(stores["compressed"], json.dumps(document).encode())


def test_format_reads_the_manifest_by_its_own_path(stores):
    assert StoreFormat().read(stores["packed"] / "ucp.json").path == str(stores["packed"])
