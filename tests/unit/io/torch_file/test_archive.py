from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from collections import OrderedDict
from math import prod
from pathlib import Path

import pytest
import torch

from ucp.core.tensor import DType, TensorRef
from ucp.errors import CorruptError, MalformedError, UnsupportedError
from ucp.io.pickle.values import GlobalName, Stub, TorchSize
from ucp.io.torch_file.archive import Archive, read_archive
from ucp.io.torch_file.storage import StorageRef

ZIPPED = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def saved(value: object, path: Path, *, zipped: bool = True) -> Archive:
    """`value` through torch.save and our reader."""
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return read_archive(str(path))


def loaded(ref: TensorRef) -> torch.Tensor:
    """The tensor that a reference points to."""
    dtype = getattr(torch, ref.dtype.value)
    if ref.numel == 0:
        return torch.empty(ref.shape, dtype=dtype)
    with Path(ref.path).open("rb") as file:
        file.seek(ref.offset)
        data = file.read(ref.extent)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).as_strided(ref.shape, ref.strides)


def assert_same(ref: object, tensor: torch.Tensor) -> None:
    """The reference gives the tensor, bit for bit."""
    assert isinstance(ref, TensorRef)
    assert ref.shape == tuple(tensor.shape)
    assert ref.strides == tuple(tensor.stride())
    got, wanted = loaded(ref).contiguous(), tensor.detach().contiguous()
    assert got.dtype == wanted.dtype
    assert got.reshape(-1).view(torch.uint8).tolist() == wanted.reshape(-1).view(torch.uint8).tolist()


def sample(dtype: DType, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    """A tensor of random bits."""
    kind = getattr(torch, dtype.value)
    if dtype == DType.BOOL:
        return torch.randint(0, 2, shape, dtype=torch.bool)
    data = torch.randint(0, 256, (max(prod(shape), 1) * dtype.itemsize,), dtype=torch.uint8)
    return data.view(kind)[: prod(shape)].reshape(shape)


@ZIPPED
def test_every_element_type(zipped: bool, tmp_path: Path) -> None:
    shapes = ((3, 5), (), (0,), (2, 0, 3), (1,))
    tensors = {(dtype, shape): sample(dtype, shape) for dtype in DType for shape in shapes}
    archive = saved(tensors, tmp_path / "x.pt", zipped=zipped)
    assert archive.kind == ("zip" if zipped else "legacy")
    assert isinstance(archive.root, dict)
    for ref, tensor in zip(archive.root.values(), tensors.values(), strict=True):
        assert_same(ref, tensor)


@ZIPPED
def test_views_and_shared_storages(zipped: bool, tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    views = {
        "base": base,
        "offset": base[1, 2:],
        "transposed": base.permute(2, 0, 1),
        "strided": base[::2, :, 1::2],
        "expanded": base[0, 0, :1].expand(4, 1),
        "stride 0": torch.ones(1).expand(3, 2),
        "scalar": base[2, 3, 4],
        "empty": base[3:],
        "diagonal": base[0].diagonal(),
    }
    root = saved(views, tmp_path / "x.pt", zipped=zipped).root
    assert isinstance(root, dict)
    for name, tensor in views.items():
        assert_same(root[name], tensor)
    assert root["offset"].offset == root["base"].offset + base[1, 2:].storage_offset() * 4
    assert root["transposed"].offset == root["base"].offset


@ZIPPED
def test_a_module_with_an_optimizer(zipped: bool, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    value = {"model": model.state_dict(), "parameters": list(model.parameters()), "optimizer": optimizer.state_dict()}
    root = saved(value, tmp_path / "x.pt", zipped=zipped).root
    assert isinstance(root, dict)
    assert type(root["model"]) is OrderedDict
    assert vars(root["model"])["_metadata"]["1"] == {"version": 2}
    for name, tensor in model.state_dict().items():
        assert_same(root["model"][name], tensor)
    for ref, parameter in zip(root["parameters"], model.parameters(), strict=True):
        assert_same(ref, parameter)
    assert root["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert_same(root["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


class LossScaler:
    """An object as DeepSpeed keeps one in its checkpoints."""

    def __init__(self) -> None:
        self.cur_scale, self.dtype = 2.0**16, torch.float16


@ZIPPED
def test_what_is_not_a_tensor(zipped: bool, tmp_path: Path) -> None:
    arguments = argparse.Namespace(hidden=4, dtype=torch.bfloat16, inner=argparse.Namespace(tp=2))
    value = {
        "args": arguments,
        "shapes": [OrderedDict(w=torch.Size([2, 3]))],
        "scaler": LossScaler(),
        "device": torch.device("cuda", 1),
        "raw": b"\x00\xff",
        "step": 3,
    }
    root = saved(value, tmp_path / "x.pt", zipped=zipped).root
    assert isinstance(root, dict)
    assert root["args"].attribute("dtype") == GlobalName("torch", "bfloat16")
    assert root["args"].attribute("inner").attribute("tp") == 2
    assert type(root["shapes"][0]["w"]) is TorchSize
    assert root["shapes"] == [OrderedDict(w=(2, 3))]
    assert root["scaler"].made_by == GlobalName(__name__, "LossScaler")
    assert root["scaler"].attribute("cur_scale") == 65536.0
    assert root["device"].args == ("cuda", 1)
    assert (root["raw"], root["step"]) == (b"\x00\xff", 3)


@ZIPPED
def test_parameters_with_attributes_are_tensors(zipped: bool, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    plain = torch.ones(3)
    plain.partition_dim = 0  # type: ignore[attr-defined]
    root = saved([parameter, plain], tmp_path / "x.pt", zipped=zipped).root
    assert isinstance(root, list)
    assert_same(root[0], parameter)
    assert_same(root[1], plain)


class Subclass(torch.Tensor):
    """A class of tensors that may mean anything by its elements."""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@ZIPPED
def test_tensors_of_other_classes_stay_recipes(zipped: bool, tmp_path: Path) -> None:
    other = torch.ones(2).as_subclass(Subclass)
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    sparse = torch.eye(2).to_sparse()
    root = saved([other, conjugate, quantised, sparse, torch.ones(2).to("meta")], tmp_path / "x.pt", zipped=zipped).root
    assert isinstance(root, list)
    assert [type(value) for value in root] == [Stub] * 5
    assert isinstance(root[2].args[0], StorageRef)
    assert isinstance(root[3].args[1][1], TensorRef)


@ZIPPED
def test_a_storage_alone(zipped: bool, tmp_path: Path) -> None:
    root = saved(torch.arange(4.0).untyped_storage(), tmp_path / "x.pt", zipped=zipped).root
    assert isinstance(root, StorageRef)
    assert (root.nbytes, root.dtype) == (16, DType.UINT8)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@ZIPPED
def test_every_pickle_protocol(zipped: bool, protocol: int, tmp_path: Path) -> None:
    tensor = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float8_e4m3fn), requires_grad=False)
    path = tmp_path / "x.pt"
    torch.save([tensor, b"x"], path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    root = read_archive(str(path)).root
    assert isinstance(root, list)
    assert_same(root[0], tensor.data)


def test_no_records_where_torch_computed_none(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        archive = saved({"a": torch.ones(3)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert archive.records == ()
    assert isinstance(archive.root, dict)
    assert_same(archive.root["a"], torch.ones(3))


@ZIPPED
def test_an_archive_in_a_larger_file(zipped: bool, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(5.0)}, buffer, _use_new_zipfile_serialization=zipped)
    path = tmp_path / "x.distcp"
    path.write_bytes(b"#" * 77 + buffer.getvalue() + b"#" * 99)
    archive = read_archive(str(path), start=77, nbytes=len(buffer.getvalue()))
    assert isinstance(archive.root, dict)
    assert_same(archive.root["a"], torch.arange(5.0))
    with pytest.raises(MalformedError, match="at byte 77"):
        read_archive(str(path), start=77)


def test_a_script_module(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("scripted/data.pkl", b"\x80\x02c__torch__\nM\n)\x81}X\x01\0\0\0aK\x01sb.")
        archive.writestr("scripted/code/__torch__.py", "class M: pass")
        archive.writestr("scripted/constants.pkl", b"\x80\x02).")
    root = read_archive(str(path)).root
    assert isinstance(root, Stub)
    assert root.attribute("a") == 1


def test_compressed_members_are_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02N.")
    with pytest.raises(UnsupportedError, match="deflated"):
        read_archive(str(path))


def test_big_endian_is_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02N.")
        archive.writestr("x/byteorder", b"big")
    with pytest.raises(UnsupportedError, match="big-endian"):
        read_archive(str(path))
    system = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": False}, 2)
    path.write_bytes(system)
    with pytest.raises(UnsupportedError, match="little-endian"):
        read_archive(str(path))


def test_the_tar_format_is_unsupported_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(b"sys_info".ljust(257, b"\0") + b"ustar" + b"\0" * 1000)
    with pytest.raises(UnsupportedError, match=r"\btar .*torch 0\.1"):
        read_archive(str(path))


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        (b"", r"\(b'', 0 bytes\)"),
        (b"hello", r"other bytes \(b'hello', 5 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x80\x02K\x01.", "magic number"),
        (b"PK\x03\x04" + b"\0" * 100, "truncated"),
    ],
)
def test_other_files_are_named(data: bytes, facts: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(MalformedError, match=facts):
        read_archive(str(path))


def test_a_zip_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b/data.pkl", b"")
    with pytest.raises(MalformedError, match=r"<folder>/data\.pkl; got "):
        read_archive(str(path))


def hand_made(path: Path, view: bytes, *, nbytes: int = 16, numel: int = 4) -> Archive:
    """An archive with one float storage of `nbytes` bytes and one view of it."""
    pid = b"((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK" + bytes([numel]) + b"tQ"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + pid + view + b"\x89}tR.")
        archive.writestr("x/data/0", b"\0" * nbytes)
    return read_archive(str(path))


def test_views_are_checked_against_their_storage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    assert hand_made(path, b"K\x02K\x02\x85K\x01\x85").root == TensorRef(
        path=str(path),
        offset=path.read_bytes().index(b"x/data/0") + 8 + 8,
        dtype=DType.FLOAT32,
        shape=(2,),
        strides=(1,),
    )
    for view in (
        b"K\x03K\x02\x85K\x01\x85",
        b"K\x00K\x05\x85K\x01\x85",
        b"K\x00K\x02\x85K\x04\x85",
        b"J\xff\xff\xff\xffK\x01\x85K\x01\x85",
        b"K\x00J\xff\xff\xff\xff\x85K\x01\x85",
        b"K\x00K\x02\x85J\xff\xff\xff\xff\x85",
        b"K\x00K\x02\x85)",
        b"K\x00K\x02\x85N\x85",
        b"K\x00(" + b"K\x01" * 65 + b"t(" + b"K\x01" * 65 + b"t",
    ):
        with pytest.raises(MalformedError, match=r"data\.pkl: .*: expected "):
            hand_made(path, view)


def test_a_storage_of_another_length_than_its_member(tmp_path: Path) -> None:
    for nbytes in (15, 17, 0):
        with pytest.raises(MalformedError, match=f"16 bytes; .*'x/data/0' has {nbytes}\\b"):
            hand_made(tmp_path / "x.pt", b"K\x00K\x02\x85K\x01\x85", nbytes=nbytes)


def test_a_damaged_pickle_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"aaaa": 1}, path)
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"aaab"))
    with pytest.raises(CorruptError, match=r"data\.pkl"):
        read_archive(str(path))


@ZIPPED
def test_every_truncation_is_refused(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3), "b": [1, "x"]}, path, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()
    for stop in range(len(data)):
        path.write_bytes(data[:stop])
        with pytest.raises(MalformedError, match=r"/x\.pt\b"):
            read_archive(str(path))


def test_bytes_after_the_end_are_refused(tmp_path: Path) -> None:
    for zipped in (True, False):
        path = tmp_path / "x.pt"
        torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=zipped)
        path.write_bytes(path.read_bytes() + b"\0")
        with pytest.raises(MalformedError, match=r"/x\.pt\b"):
            read_archive(str(path))


def named(path: Path) -> Path:
    torch.save({"step": torch.ones(3)}, path)
    return path


def exchange(one: Path, other: Path) -> None:
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)


def test_files_that_were_exchanged_are_told_by_the_names_they_were_saved_under(tmp_path):
    one, other, third = (named(tmp_path / f"rank_{n}.states.pt") for n in range(3))
    assert read_archive(str(one)).saved_as == "rank_0.states"
    exchange(one, other)
    for path, saved_as in ((one, other), (other, one)):
        with pytest.raises(MalformedError, match=rf"{path.name} .*{saved_as.name}.*exchanged"):
            read_archive(str(path))
    exchange(one, third)
    for path in (one, other, third):
        with pytest.raises(MalformedError, match=rf"{path.name} .*exchanged"):
            read_archive(str(path))


def test_a_file_that_was_renamed_to_that_of_another_rank(tmp_path):
    path = named(tmp_path / "rank_0.pt").rename(tmp_path / "rank_12.pt")
    with pytest.raises(MalformedError, match=r"rank_12\.pt .*rank_0\.pt, .*renamed"):
        read_archive(str(path))


def test_a_file_that_was_renamed_otherwise_or_copied_is_read(tmp_path):
    one, other = (named(tmp_path / f"{n}.pt") for n in "ab")
    assert read_archive(str(one.rename(tmp_path / "c.pt"))).saved_as == "a"
    (tmp_path / "d.pt").write_bytes(other.read_bytes())
    assert read_archive(str(tmp_path / "d.pt")).saved_as == "b"
    (tmp_path / "a.pt").write_bytes(b"no archive")
    assert read_archive(str(tmp_path / "c.pt")).saved_as == "a"
    buffer = io.BytesIO()
    torch.save(1, buffer)
    (tmp_path / "e.pt").write_bytes(buffer.getvalue())
    assert read_archive(str(tmp_path / "e.pt")).saved_as == "archive"
