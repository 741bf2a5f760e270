from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ucp.core.tensor import DType, contiguous_strides
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.safetensors import layout_safetensors, read_header

DTYPES = [dtype for dtype in DType if dtype != DType.COMPLEX128]


def written(path: Path, header: object, data: bytes = b"") -> str:
    """A file with that header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return str(path)


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "flag": torch.tensor([True, False]),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(str(path))
    data = path.read_bytes()
    assert header.metadata == {"format": "pt"}
    assert set(header.tensors) == set(tensors)
    for name, tensor in tensors.items():
        ref = header.tensors[name]
        assert (ref.path, ref.shape, ref.strides) == (str(path), tuple(tensor.shape), contiguous_strides(tensor.shape))
        assert data[ref.offset : ref.offset + ref.nbytes] == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)], ids=str)
def test_safetensors_opens_what_we_lay_out(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    layout = layout_safetensors([(f"é {dtype}", dtype, shape) for dtype in DTYPES], metadata={"k": "v"})
    data = bytearray(layout.header.ljust(layout.nbytes, b"\x01"))
    path.write_bytes(data)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"k": "v"}
        for dtype in DTYPES:
            if dtype in (DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ):
                continue
            tensor = file.get_tensor(f"é {dtype}")
            assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype.value), shape)
    header = read_header(str(path))
    assert {name: ref.offset for name, ref in header.tensors.items()} == layout.offsets
    assert header.metadata == {"k": "v"}


def test_elements_begin_at_a_multiple_of_64() -> None:
    for count in range(60):
        layout = layout_safetensors([("x" * count, DType.INT8, (1,))])
        assert len(layout.header) % 64 == 0
        assert int.from_bytes(layout.header[:8], "little") == len(layout.header) - 8
        assert layout.offsets == {"x" * count: len(layout.header)}
        assert layout.nbytes == len(layout.header) + 1


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    layout = layout_safetensors([])
    path.write_bytes(layout.header)
    assert read_header(str(path)).tensors == {}
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == []


@pytest.mark.parametrize("names", [("a", "a"), ("__metadata__",)])
def test_names_that_cannot_be(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"got '{names[-1]}'$"):
        layout_safetensors([(name, DType.INT8, ()) for name in names])


def entry(first: int, stop: int, shape: object = None, dtype: str = "U8") -> dict[str, object]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": [stop - first] if shape is None else shape, "data_offsets": [first, stop]}


@pytest.mark.parametrize(
    ("header", "facts"),
    [
        ({"a": entry(0, 2), "b": entry(1, 4)}, "overlap"),
        ({"a": entry(0, 2), "b": entry(3, 4)}, "hole"),
        ({"a": entry(1, 4)}, "hole"),
        ({"a": entry(0, 3)}, "71 bytes; got 72"),
        ({"a": entry(0, 5)}, "73 bytes; got 72"),
        ({"a": entry(0, 4, [2])}, "got 4 bytes"),
        ({"a": entry(4, 0, [4])}, "got -4 bytes"),
        ({"a": entry(0, 4, [-4])}, "data_offsets of 'a'; got "),
        ({"a": entry(0, 4, [4.0])}, "data_offsets of 'a'; got "),
        ({"a": entry(0, 4, [True] * 2)}, "data_offsets of 'a'; got "),
        ({"a": entry(0, 4, [1] * 65)}, "data_offsets of 'a'; got "),
        ({"a": entry(0, 4, [2**70])}, "data_offsets of 'a'; got "),
        ({"a": {"dtype": "U8", "shape": [4]}}, "data_offsets of 'a'; got "),
        ({"a": 3}, "data_offsets of 'a'; got "),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
        ({"__metadata__": []}, "__metadata__"),
        ([], "got a list"),
        (b'{"a":1,"a":2}', "'a' twice"),
        (b'{"a":%(a)s,"a":%(a)s}' % {b"a": b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'}, "'a' twice"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', "'dtype' twice"),
        (b'{"__metadata__":{"a":"1","a":"2"},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "'a' twice"),
        (b"{", "header of JSON; "),
        (b"\xff\xfe", "header of JSON; "),
        (b"[" * 100_000, "header of JSON; "),
        (b'{"a":' + b"9" * 5000 + b"}", "header of JSON; "),
    ],
)
def test_headers_that_cannot_be(header: object, facts: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedError, match=facts):
        read_header(written(tmp_path / "x.safetensors", header, b"1234"))


def test_unknown_element_types_are_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="F4"):
        read_header(written(tmp_path / "x.safetensors", {"a": entry(0, 4, [8], "F4")}, b"1234"))


NESTED = (500_000).to_bytes(8, "little") + b'{"a":' * 100_000
"""A header nested as deeply as no parser goes."""


@pytest.mark.parametrize("data", [b"", b"\0" * 9, b"\xff" * 100, (10**9).to_bytes(8, "little") + b"{}", NESTED])
def test_other_files(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(MalformedError, match=r"/x\.safetensors: "):
        read_header(str(path))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(OrderedDict(a=torch.ones(3), b=torch.ones(2, 2)), path)
    data = path.read_bytes()
    for stop in range(len(data)):
        path.write_bytes(data[:stop])
        with pytest.raises(MalformedError, match=r"/x\.safetensors: "):
            read_header(str(path))
