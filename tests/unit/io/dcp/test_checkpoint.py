"""Folders of torch.distributed.checkpoint, written by torch itself and then damaged."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
)

from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, MissingFileError, UnsupportedError
from ucp.io.dcp import items as dcp_items
from ucp.io.dcp.checkpoint import Dcp, read_dcp
from ucp.io.pickle.unpickle import Parsed, parse_pickle
from ucp.io.pickle.values import Stub
from ucp.io.torch_file.archive import read_archive

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3) * 7,
    "c": torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "d": torch.tensor(3.5),
    "e": torch.arange(300_000, dtype=torch.int64),
    "f": torch.zeros(0, 4),
    "g": torch.ones(5, dtype=torch.bool),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of several tensors and objects."""
    state = {**TENSORS, "note": {"step": 3}, "none": [None], "none2": [None]}
    save(state, tmp_path / "x")
    return tmp_path / "x"


def save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it assumes a single process
        dcp.save(state, storage_writer=FileSystemWriter(folder, single_file_per_rank=True), no_dist=True)


def elements(ref: TensorRef) -> bytes:
    with open(ref.path, "rb") as file:
        file.seek(ref.offset)
        return file.read(ref.nbytes)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()


def whole(found: Dcp, key: str) -> TensorRef:
    (chunk,) = found.tensors([key])[key].chunks
    return chunk.ref


def test_tensors_are_found_where_torch_wrote_them(folder: Path) -> None:
    found = read_dcp(str(folder))
    tensors = found.tensors(found.metadata.tensors)
    assert set(tensors) == set(TENSORS)
    for key, stored in tensors.items():
        assert stored.saved.shape == tuple(TENSORS[key].shape)
        assert [elements(chunk.ref) for chunk in stored.chunks] == ([raw(TENSORS[key])] if TENSORS[key].numel() else [])


def test_every_chunk_has_its_checksum(folder: Path) -> None:
    found = read_dcp(str(folder))
    for stored in found.tensors(found.metadata.tensors).values():
        for chunk, record in zip(stored.chunks, stored.records, strict=True):
            assert (record.path, record.offset, record.nbytes) == (chunk.ref.path, chunk.ref.offset, chunk.ref.nbytes)
            assert record.crc32 == crc32(elements(chunk.ref))


def test_items_of_a_kind_are_parsed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    read = dcp_items.read_embedded
    monkeypatch.setattr(
        dcp_items, "read_embedded", lambda file, **where: parsed.append(where["start"]) or read(file, **where)
    )
    found = read_dcp(str(folder))
    alike = found.tensors(["a", "b"])
    assert len(parsed) == 1
    for key, stored in alike.items():
        place = found.metadata.tensors[key].chunks[0].place
        archive = read_archive(found.path(place.file), start=place.offset, nbytes=place.nbytes)
        assert archive.root == stored.chunks[0].ref
        assert archive.records == stored.records


def test_objects_are_plain_values(folder: Path) -> None:
    found = read_dcp(str(folder))
    values = {key: stored.value for key, stored in found.objects(found.metadata.objects).items()}
    assert values["note.step"] == 3
    assert values["none"] == values["none2"] == [None]
    assert found.metadata.paths["note.step"] == ("note", "step")


@pytest.mark.parametrize("at", [8, 40, 200, 500])
def test_a_changed_byte_of_the_structure_is_not_overlooked(folder: Path, at: int) -> None:
    """The second of two items of a kind is compared with the first, byte for byte; what differs is parsed."""
    found = read_dcp(str(folder))
    place = found.metadata.tensors["b"].chunks[0].place
    data = bytearray(Path(found.path(place.file)).read_bytes())
    data[place.offset + at] ^= 0x55
    Path(found.path(place.file)).write_bytes(data)
    clean = whole(read_dcp(str(folder)), "a")
    try:
        ref = whole(read_dcp(str(folder)), "b")
    except MalformedError:
        return
    assert elements(ref) == raw(TENSORS["b"])  # the byte says nothing about the elements
    assert ref != clean


def test_an_item_that_is_another_tensor_is_refused(folder: Path) -> None:
    def swap(metadata: Any) -> None:
        index = {key.fqn: key for key in metadata.storage_data}
        data = metadata.storage_data
        data[index["a"]], data[index["c"]] = data[index["c"]], data[index["a"]]

    edit(folder, swap)
    found = read_dcp(str(folder))
    with pytest.raises(MalformedError, match=r"(?s)__0_0\.distcp: 2 items "):
        found.tensors(["a", "c"])


def edit(folder: Path, change: Any) -> None:
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(metadata, file)


def test_all_missing_files_are_named(folder: Path) -> None:
    def scatter(metadata: Any) -> None:
        for number, (key, info) in enumerate(list(metadata.storage_data.items())[:3]):
            metadata.storage_data[key] = _StorageInfo(f"__{number + 7}_0.distcp", info.offset, info.length)

    edit(folder, scatter)
    with pytest.raises(MissingFileError, match=r"(?s)3 of 4 files .*__7_0.*__8_0.*__9_0"):
        read_dcp(str(folder))


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(MalformedError, match=r"(?s)1 truncated .*__0_0\.distcp"):
        read_dcp(str(folder))


def test_no_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()
    with pytest.raises(MissingFileError, match=r"\.metadata"):
        read_dcp(str(folder))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", ""])
def test_items_lie_in_the_folder(folder: Path, name: str) -> None:
    def escape(metadata: Any) -> None:
        key = next(iter(metadata.storage_data))
        metadata.storage_data[key] = _StorageInfo(name, 0, 10)

    edit(folder, escape)
    with pytest.raises(MalformedError, match=rf"/\.metadata: .*; got {name!r}"):
        read_dcp(str(folder))


def test_a_place_that_is_not_recorded(folder: Path) -> None:
    def drop(metadata: Any) -> None:
        for key in [key for key in metadata.storage_data if key.fqn in ("a", "c", "none")]:
            del metadata.storage_data[key]

    edit(folder, drop)
    with pytest.raises(MalformedError, match=r"3 places:\n  a: .*\n  c: .*\n  none: "):
        read_dcp(str(folder))


def test_transformed_items_are_refused(folder: Path) -> None:
    def compress(metadata: Any) -> None:
        key = next(iter(metadata.storage_data))
        info = metadata.storage_data[key]
        metadata.storage_data[key] = _StorageInfo(info.relative_path, info.offset, info.length, ["stream.zstd/1"])

    edit(folder, compress)
    with pytest.raises(UnsupportedError, match=r"stream\.zstd/1"):
        read_dcp(str(folder))


def test_unknown_element_types_are_named(folder: Path) -> None:
    edit(folder, lambda metadata: setattr(metadata.state_dict_metadata["a"].properties, "dtype", torch.qint8))
    with pytest.raises(UnsupportedError, match=r"\n  a: .*torch\.qint8"):
        read_dcp(str(folder))


def test_a_hostile_pickle_runs_nothing(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    edit(folder, lambda metadata: setattr(metadata, "planner_data", Evil()))
    assert read_dcp(str(folder)).metadata.paths == {}
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(MalformedError, match=r"/\.metadata: .*; got .*mkdir"):
        read_dcp(str(folder))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"not a pickle", b"\x80\x04]\x94.extra"])
def test_other_bytes_are_no_metadata(folder: Path, data: bytes) -> None:
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(MalformedError, match=r"/\.metadata: "):
        read_dcp(str(folder))


def test_plans_of_the_writer_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_dcp(str(folder)).metadata
    edit(folder, lambda metadata: setattr(metadata, "all_local_plans", [{"plan": object.__new__(Plan)}] * 3))
    parsed: list[bytes] = []

    def parse(data: bytes, *, where: str) -> Parsed:
        parsed.append(data)
        return parse_pickle(data, where=where)

    monkeypatch.setattr("ucp.io.dcp.metadata.parse_pickle", parse)
    after = read_dcp(str(folder)).metadata
    (data,) = parsed
    assert b"\x0fall_local_plans" not in data
    assert (before.tensors, before.objects, set(before.facts)) == (after.tensors, after.objects, set(after.facts))


class Plan:
    """Something of the writer."""


def test_plans_in_the_middle_are_read(folder: Path) -> None:
    def plan(metadata: Any) -> None:
        storage = metadata.storage_data
        del metadata.storage_data
        metadata.all_local_plans = [1, 2]
        metadata.storage_data = storage

    edit(folder, plan)
    assert set(read_dcp(str(folder)).metadata.tensors) == set(TENSORS)


def test_metadata_of_other_classes(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"x": BytesStorageMetadata()}, None, {}, None)))
    with pytest.raises(MalformedError, match=r"x: no place"):
        read_dcp(str(folder))
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"x": 3}, None, {}, None)))
    with pytest.raises(MalformedError, match=r"str \('x'\) .*int\b"):
        read_dcp(str(folder))


def test_facts_keep_what_is_not_read(folder: Path) -> None:
    edit(folder, lambda metadata: setattr(metadata, "mcore_data", {"k": {"shape": torch.Size((2, 3))}}))
    facts = read_dcp(str(folder)).metadata.facts
    assert facts["mcore_data"] == {"k": {"shape": (2, 3)}}
    assert isinstance(facts["storage_meta"], Stub)


def test_many_items_are_read_in_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"t{number:03}": torch.full((8, 8), float(number)) for number in range(200)}
    save(state, tmp_path)
    requests = []
    pread = os.pread
    found = read_dcp(str(tmp_path))
    monkeypatch.setattr(os, "pread", lambda *args: requests.append(args) or pread(*args))
    tensors = found.tensors(found.metadata.tensors)
    assert len(requests) < 12
    for key, stored in tensors.items():
        assert elements(stored.chunks[0].ref) == raw(state[key])
