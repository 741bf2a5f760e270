"""Distributed checkpoints that are laid out here, read by torch and by our own reader."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from zlib_ng import zlib_ng

from ucp.core.region import Box, RegionPair
from ucp.core.target import CrcField, Slice
from ucp.core.tensor import DType, TensorRef
from ucp.io.dcp.checkpoint import read_dcp
from ucp.io.dcp.emit import DcpDraft, NewChunk
from ucp.io.torch_file.draft import FinishedFile, Part

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def piece(name: str, *shape: int, dtype: DType = DType.FLOAT32) -> Slice:
    """All of a parameter `name`."""
    whole = Box.full(shape)
    return Slice(
        param=name,
        state="weight",
        dtype=dtype,
        pairs=(RegionPair(whole, whole),),
        local_shape=shape,
        start=0,
        stop=whole.numel,
    )


def chunk(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: DType = DType.FLOAT32) -> NewChunk:
    return NewChunk(offsets=offsets, sizes=sizes, parts=(Part(offset=0, slice=piece(name, *sizes, dtype=dtype)),))


def write(
    folder: Path, drafted: tuple[FinishedFile, ...], contents: Mapping[str, np.ndarray], raw: bytes = b""
) -> None:
    """Carry a draft out; no byte may be written twice."""
    for own in drafted:
        data, taken = bytearray(own.file.nbytes), bytearray(own.file.nbytes)

        def put(offset: int, part: bytes, data: bytearray = data, taken: bytearray = taken) -> None:
            assert not any(taken[offset : offset + len(part)])
            data[offset : offset + len(part)] = part
            taken[offset : offset + len(part)] = b"\1" * len(part)

        for literal in own.file.literals:
            put(literal.offset, literal.data)
        for place in own.placements:
            assert place.path == own.file.path
            put(place.offset, contents[place.slice.param].tobytes())
        for copy in own.raw:
            put(copy.offset, raw[copy.src.offset : copy.src.offset + copy.src.nbytes])
        for crc in own.file.crcs:
            seal(data, crc)
        path = folder / own.file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def seal(data: bytearray, crc: CrcField) -> None:
    total = zlib_ng.crc32(bytes(data[crc.start : crc.stop])).to_bytes(4, "little")
    for at in crc.at:
        data[at : at + 4] = total


def loaded(folder: Path, **wanted: torch.Tensor) -> dict[str, torch.Tensor]:
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return wanted


def test_a_tensor_in_chunks(tmp_path):
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    draft = DcpDraft("iter")
    draft.add_tensor("w", DType.FLOAT32, (4, 6), [chunk("top", (0, 0), (2, 6)), chunk("left", (2, 0), (2, 4))])
    draft.add_tensor("w", DType.FLOAT32, (4, 6), [chunk("right", (2, 4), (2, 2))])
    write(tmp_path, draft.finish(), {"top": whole[:2], "left": whole[2:, :4], "right": whole[2:, 4:]})
    found = loaded(tmp_path / "iter", w=torch.zeros(4, 6))
    assert torch.equal(found["w"], torch.from_numpy(whole))
    stored = read_dcp(str(tmp_path / "iter")).tensors(["w"])["w"]
    assert [own.offsets for own in stored.chunks] == [(0, 0), (2, 0), (2, 4)]
    assert all(own.ref.offset % 64 == 0 for own in stored.chunks)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64, DType.INT64, DType.BOOL, DType.UINT8])
def test_small_tensors_of_every_kind(dtype, tmp_path):
    draft = DcpDraft()
    shapes: dict[str, tuple[int, ...]] = {"number": (), "one": (1,), "few": (3,), "row": (1, 1, 5)}
    contents = {}
    for name, shape in shapes.items():
        draft.add_tensor(name, dtype, shape, [chunk(name, (0,) * len(shape), shape, dtype)])
        numel = int(np.prod(shape))
        contents[name] = np.arange(1, 1 + numel * dtype.itemsize, dtype=np.uint8) & 1
    write(tmp_path, draft.finish(), contents)
    empty = {name: torch.zeros(shape, dtype=getattr(torch, dtype.value)) for name, shape in shapes.items()}
    for name, tensor in loaded(tmp_path, **empty).items():
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == contents[name].tobytes()


def test_a_chunk_of_several_parts(tmp_path):
    a, b = np.arange(4, dtype=np.float32), np.arange(10, 12, dtype=np.float32)
    parts = (Part(offset=0, slice=piece("a", 4)), Part(offset=4, slice=piece("b", 2)))
    draft = DcpDraft()
    draft.add_tensor("w", DType.FLOAT32, (3, 2), [NewChunk(offsets=(0, 0), sizes=(3, 2), parts=parts)])
    write(tmp_path, draft.finish(), {"a": a, "b": b})
    assert loaded(tmp_path, w=torch.zeros(3, 2))["w"].flatten().tolist() == [0, 1, 2, 3, 10, 11]


def test_a_chunk_is_filled_exactly():
    with pytest.raises(ValueError, match=r"\(5,\) at \(0,\) .*4 elements"):
        NewChunk(offsets=(0,), sizes=(5,), parts=(Part(offset=0, slice=piece("a", 4)),))


def test_values_are_stored_as_they_are(tmp_path):
    raw = bytes(range(16))
    ref = TensorRef(path="src", offset=4, dtype=DType.UINT8, shape=(8,), strides=(1,))
    draft = DcpDraft()
    draft.add_value("empty/shard_0_1", None)
    draft.add_value("rng/shard_0_1", {"state": ref, "numbers": (1, 2.5, "x")})
    write(tmp_path, draft.finish(), {}, raw)
    read = read_dcp(str(tmp_path))
    found = read.objects({key: read.metadata.objects[key] for key in ("empty/shard_0_1", "rng/shard_0_1")})
    assert found["empty/shard_0_1"].value is None
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    place = next(own for index, own in metadata.storage_data.items() if index.fqn.startswith("rng"))
    item = (tmp_path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    (tmp_path / "item.pt").write_bytes(item)
    value = torch.load(tmp_path / "item.pt")
    assert value["state"].tolist() == list(raw[4:12])
    assert value["numbers"] == (1, 2.5, "x")


def test_files_end_where_they_are_long_enough(tmp_path):
    draft = DcpDraft(file_nbytes=4000)
    contents = {}
    for number in range(6):
        draft.add_tensor(f"w{number}", DType.FLOAT32, (100,), [chunk(f"w{number}", (0,), (100,))])
        contents[f"w{number}"] = np.full(100, number, dtype=np.float32)
    drafted = draft.finish()
    assert [own.file.path for own in drafted] == ["__0_0.distcp", "__1_0.distcp", ".metadata"]
    write(tmp_path, drafted, contents)
    found = loaded(tmp_path, **{name: torch.zeros(100) for name in contents})
    assert all(torch.equal(found[f"w{number}"], torch.full((100,), float(number))) for number in range(6))


def test_metadata_is_what_torch_writes(tmp_path):
    """Attribute by attribute; torch adds plans and random ids, which no reader needs."""
    dcp.save({"w": torch.zeros(2, 3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "torch"), no_dist=True)
    draft = DcpDraft("ours")
    draft.add_tensor("w", DType.FLOAT32, (2, 3), [chunk("w", (0, 0), (2, 3))])
    write(tmp_path, draft.finish(), {"w": np.zeros((2, 3), dtype=np.float32)})
    ours, theirs = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("ours", "torch"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.storage_data) == list(theirs.storage_data)
    assert ours.version == theirs.version
