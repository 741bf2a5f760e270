from __future__ import annotations

import io
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ucp.core.tensor import DType
from ucp.io.files import open_source
from ucp.io.pickle.values import GlobalName, Stub, TorchSize
from ucp.io.torch_file import layout as layout_module
from ucp.io.torch_file.archive import read_archive
from ucp.io.torch_file.layout import TorchZip, layout_torch_zip
from ucp.io.torch_file.storage import NewStorage, NewTensor
from ucp.io.torch_file.zipdir import Window, read_directory

if TYPE_CHECKING:
    from .conftest import Apart

CarryOut = Callable[[TorchZip, dict[NewStorage, bytes]], bytes]


def tensor_of(dtype: DType, *shape: int) -> torch.Tensor:
    """A tensor with some bits set."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 3).to(getattr(torch, dtype.value))


@pytest.fixture(params=[True, False], ids=["mmap", "read"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., object]:
    """torch.load of some bytes, mapped or read."""

    def loading(data: bytes, *, weights_only: bool = True) -> object:
        path = tmp_path / "out.pt"
        path.write_bytes(data)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        return torch.load(path, mmap=request.param, weights_only=weights_only)

    return loading


def test_torch_loads_every_element_type(load: Callable[..., object], apart: Apart, carried_out: CarryOut) -> None:
    tensors = [tensor_of(dtype, *shape) for dtype in DType for shape in ((2, 3), (), (0, 4))]
    layout = layout_torch_zip([apart.take(tensor) for tensor in tensors])
    result = load(carried_out(layout, apart.contents))
    assert isinstance(result, list)
    for got, wanted in zip(result, tensors, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.reshape(-1).view(torch.uint8).equal(wanted.reshape(-1).view(torch.uint8))


def test_views_share_their_storage(load: Callable[..., object], apart: Apart, carried_out: CarryOut) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    views = [base, base.permute(2, 0, 1), base[1, 1:], base[0, 0, :1].expand(5, 1), base[2:], base[1, 2, 3]]
    layout = layout_torch_zip([apart.take(view) for view in views])
    result = load(carried_out(layout, apart.contents))
    assert isinstance(result, list)
    assert len(layout.storages) == 1
    for got, wanted in zip(result, views, strict=True):
        assert got.equal(wanted)
        assert got.stride() == wanted.stride()
        assert got.untyped_storage()._cdata == result[0].untyped_storage()._cdata


def test_what_is_not_a_tensor(load: Callable[..., object], apart: Apart, carried_out: CarryOut) -> None:
    metadata: OrderedDict[str, object] = OrderedDict(w=apart.take(torch.ones(2)))
    metadata._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    value = {
        "model": metadata,
        "shape": TorchSize((2, 3)),
        "dtype": GlobalName("torch", "bfloat16"),
        "device": Stub(GlobalName("torch", "device"), ("cpu",), new=False),
        "args": Stub(GlobalName("argparse", "Namespace"), state={"a": [1, None]}, has_state=True),
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "large": 2**80,
    }
    result = load(carried_out(layout_torch_zip(value), apart.contents), weights_only=False)
    assert isinstance(result, dict)
    assert result["model"]["w"].equal(torch.ones(2))
    assert result["model"]._metadata == {"": {"version": 1}}
    assert type(result["shape"]) is torch.Size
    assert result["shape"] == (2, 3)
    assert result["dtype"] is torch.bfloat16
    assert result["device"] == torch.device("cpu")
    assert vars(result["args"]) == {"a": [1, None]}
    assert (result["bytes"], result["set"], result["large"]) == (b"\x00\xff", {1, 2}, 2**80)


def test_the_file_is_that_of_torch_byte_for_byte(apart: Apart, carried_out: CarryOut) -> None:
    value = {
        "a": torch.arange(5, dtype=torch.float32),
        "b": torch.ones(3, 100, dtype=torch.bfloat16),
        "empty": torch.zeros(0),
        "u": torch.ones(7, dtype=torch.uint16),
        "n": [1, "two", None, 3.0, b"four", {"five": (6,)}],
    }
    buffer = io.BytesIO()
    torch.save(value, buffer)
    wanted = buffer.getvalue()
    ours = {key: apart.take(item) if isinstance(item, torch.Tensor) else item for key, item in value.items()}
    got = carried_out(layout_torch_zip(ours), apart.contents)
    assert without_serialization_id(got) == without_serialization_id(wanted)


def without_serialization_id(data: bytes) -> bytes:
    """The file with the one member blanked that torch derives from the bytes of the storages, and its checksums."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = archive.getinfo("archive/.data/serialization_id")
        value = archive.read(info)
    return data.replace(value, b"?" * 40).replace(info.CRC.to_bytes(4, "little"), b"????")


def test_a_layout_is_a_plan_of_every_byte(apart: Apart) -> None:
    storages = [NewStorage(DType.FLOAT32, n) for n in (3, 0, 100)]
    layout = layout_torch_zip([NewTensor(storage=s, shape=(s.numel,), strides=(1,)) for s in storages])
    spans = [(literal.offset, literal.offset + len(literal.data)) for literal in layout.literals]
    assert spans == sorted(spans)
    spans += [(offset, offset + storage.nbytes) for storage, offset in layout.storages.items() if storage.nbytes]
    at = 0
    for start, stop in sorted(spans):
        assert start == at
        at = stop
    assert at == layout.nbytes
    assert [(crc.start, crc.stop - crc.start) for crc in layout.crcs] == [
        (layout.storages[storages[0]], 12),
        (layout.storages[storages[2]], 400),
    ]
    known = {
        at: literal.data[at - literal.offset : at - literal.offset + 4]
        for crc in layout.crcs
        for at in crc.at
        for literal in layout.literals
        if literal.offset <= at < literal.offset + len(literal.data)
    }
    assert list(known.values()) == [b"\0\0\0\0"] * 4


@pytest.mark.slow
def test_more_than_65535_members(tmp_path: Path, carried_out: CarryOut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a pickle that refers to one of them: pickling all takes seconds."""
    storages = [NewStorage(DType.UINT8, 1) for _ in range(66_000)]
    pickled = layout_module.emit_pickle(NewTensor(storage=storages[0], shape=(1,), strides=(1,)))
    monkeypatch.setattr(layout_module, "emit_pickle", lambda _: replace(pickled, storages=tuple(storages)))
    data = carried_out(layout_torch_zip(None), {s: bytes([index % 251]) for index, s in enumerate(storages)})
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    reader = torch._C.PyTorchFileReader(str(path))  # of torch.load, which spends seconds on as many tensors
    last = range(65_000, 66_000)
    assert [reader.get_record(f"data/{n}")[0] for n in last] == [n % 251 for n in last]
    with open_source(str(path)) as file:
        assert len(read_directory(Window(file, 0, file.nbytes))) == 66_006
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == 66_006


@pytest.mark.slow
def test_members_and_files_past_4_gib(tmp_path: Path) -> None:
    large, small, empty = (
        NewStorage(DType.UINT8, 2**32 + 100),
        NewStorage(DType.FLOAT32, 5),
        NewStorage(DType.FLOAT32, 0),
    )
    root = {
        name: NewTensor(storage=s, shape=(s.numel,), strides=(1,))
        for name, s in (("large", large), ("small", small), ("empty", empty))
    }
    layout = layout_torch_zip(root)
    path = tmp_path / "sparse.pt"
    with path.open("wb") as file:
        file.truncate(layout.nbytes)
        for literal in layout.literals:
            os.pwrite(file.fileno(), literal.data, literal.offset)
        os.pwrite(file.fileno(), torch.arange(5.0).numpy().tobytes(), layout.storages[small])
        os.pwrite(file.fileno(), b"\x07", layout.storages[large] + large.nbytes - 1)
    result = torch.load(path, mmap=True)
    assert result["large"].numel() == large.numel
    assert result["large"][-1] == 7
    assert result["small"].equal(torch.arange(5.0))
    assert result["empty"].numel() == 0
    root_again = read_archive(str(path)).root
    assert isinstance(root_again, dict)
    assert [ref.offset for ref in root_again.values()] == list(layout.storages.values())
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == large.nbytes
