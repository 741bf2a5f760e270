from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from ucp.errors import MalformedError, UnsupportedError
from ucp.io.files import open_source
from ucp.io.torch_file.zipdir import Window, data_offset, data_offsets, read_directory


def directory(path: Path, data: bytes, *, start: int = 0) -> Window:
    """The archive `data` at byte `start` of a file."""
    path.write_bytes(b"#" * start + data)
    file = open_source(str(path))
    return Window(file, start, file.nbytes - start)


def archive_of(value: object) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("start", [0, 77])
def test_derived_offsets_are_those_of_the_local_headers(start: int, tmp_path: Path) -> None:
    data = archive_of([torch.ones(n, dtype=torch.uint8) for n in (0, 1, 63, 64, 65, 1000, 0, 5)])
    window = directory(tmp_path / "x", data, start=start)
    members = read_directory(window)
    derived = data_offsets(window, tuple(members.values()), directory=members)
    assert derived == {name: data_offset(window, member) for name, member in members.items()}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name, member in members.items():
            assert window.read(derived[name], member.nbytes) == archive.read(name)
            assert member.crc32 == archive.getinfo(name).CRC


def test_offsets_are_derived_without_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = directory(tmp_path / "x", archive_of([torch.ones(n) for n in range(50)]))
    members = read_directory(window)
    stored = tuple(member for name, member in members.items() if "/data/" in name)
    monkeypatch.setattr(Window, "read", lambda *_: pytest.fail("a member was read"))
    data_offsets(window, stored, directory=members)


def test_offsets_of_other_writers_are_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for index in range(70):
            archive.writestr(f"x/data/{index}", b"a" * index)
    window = directory(tmp_path / "x", buffer.getvalue())
    members = read_directory(window)
    derived = data_offsets(window, tuple(members.values()), directory=members)
    assert derived == {name: data_offset(window, member) for name, member in members.items()}


def test_zip64_sizes_of_python(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, archive.open("x/data.pkl", "w", force_zip64=True) as member:
        member.write(b"abc")
    window = directory(tmp_path / "x", buffer.getvalue())
    members = read_directory(window)
    assert window.read(data_offset(window, members["x/data.pkl"]), 3) == b"abc"


def test_a_directory_without_zip64_records(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w"):
        pass
    assert read_directory(directory(tmp_path / "x", buffer.getvalue())) == {}


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda data: b"#" + data, "zip64 locator"),
        (lambda data: data + b"#", "end record"),
        (lambda data: data.replace(b"PK\x05\x06", b"PK\x05\x07"), "end record"),
        (lambda data: data.replace(b"PK\x01\x02", b"PK\x01\x03"), r"member at byte \d+ of "),
        (lambda data: data.replace(b"PK\x06\x06", b"PK\x06\x05"), "zip64 end record"),
        (lambda data: data.replace(b"byteorder", b"byte\xffrder"), r"UTF-8: b'archive/byte\\xff"),
        (lambda data: data.replace(b"data/0", b"data/1"), r"two members .*'archive/data/1'"),
        (lambda _: b"", "at byte 0"),
        (lambda _: b"PK\x05\x06", "at byte 0"),
    ],
)
def test_damaged_directories(make: object, facts: str, tmp_path: Path) -> None:
    assert callable(make)
    window = directory(tmp_path / "x", make(archive_of([torch.ones(1), torch.ones(2)])))
    with pytest.raises(MalformedError, match=facts):
        read_directory(window)


def test_a_damaged_local_header(tmp_path: Path) -> None:
    data = archive_of([torch.ones(1)])
    window = directory(tmp_path / "x", data.replace(b"PK\x03\x04", b"PK\x03\x05"))
    members = read_directory(window)
    with pytest.raises(MalformedError, match=r"header .*'archive/data\.pkl'"):
        data_offset(window, members["archive/data.pkl"])


def test_encrypted_members_are_unsupported(tmp_path: Path) -> None:
    data = archive_of([])
    flags = data.index(b"PK\x01\x02") + 8
    window = directory(tmp_path / "x", data[:flags] + b"\x01" + data[flags + 1 :])
    with pytest.raises(UnsupportedError, match="encrypted"):
        read_directory(window)
