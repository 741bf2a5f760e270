from __future__ import annotations

import os
from pathlib import Path

import pytest

from ucp.errors import MalformedError, MissingFileError, SourceError
from ucp.io import files as source
from ucp.io.files import open_source, split_parts

DATA = bytes(range(256)) * 4


@pytest.fixture(params=["whole", "split"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = tmp_path / "x.pt"
    if request.param == "whole":
        name.write_bytes(DATA)
    else:
        for index, (start, stop) in enumerate(((0, 100), (100, 100), (100, 777), (777, 1024))):
            Path(f"{name}-{index}.4").write_bytes(DATA[start:stop])
    return str(name)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1024), (0, 0), (1024, 0), (99, 2), (100, 1), (50, 900), (1023, 1)])
def test_reads_what_is_there(path: str, offset: int, nbytes: int) -> None:
    with open_source(path) as file:
        assert (file.path, file.nbytes) == (path, 1024)
        assert file.read(offset, nbytes) == DATA[offset : offset + nbytes]


@pytest.mark.parametrize("sizes", [(1024,), (1, 0, 99, 1, 923), (10,) * 100])
@pytest.mark.parametrize("most", [1, 3, 1024])
def test_fills_many_buffers(path: str, sizes: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_IOV_MAX", most)
    buffers = [bytearray(n) for n in sizes]
    with open_source(path) as file:
        file.read_into([memoryview(buffer) for buffer in buffers], 0)
    assert b"".join(buffers) == DATA[: sum(sizes)]


def test_short_reads_are_continued(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: DATA[at : at + min(nbytes, 3)])
    buffers = [bytearray(500), bytearray(524)]
    with open_source(path) as file:
        file.read_into([memoryview(buffer) for buffer in buffers], 0)
        assert file.read(5, 1000) == DATA[5:1005]
    assert b"".join(buffers) == DATA


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1025), (1024, 1), (5000, 1), (-1, 1), (0, -1)])
def test_past_the_end_is_malformed(path: str, offset: int, nbytes: int) -> None:
    with open_source(path) as file, pytest.raises(MalformedError, match=f"{nbytes} bytes at {offset}; .* 1024:"):
        file.read(offset, nbytes)


def test_filling_past_the_end_is_malformed(path: str) -> None:
    with open_source(path) as file, pytest.raises(MalformedError, match=r"1 bytes at 1024; .* 1024:"):
        file.read_into([memoryview(bytearray(1020)), memoryview(bytearray(5))], 0)


def test_a_file_that_shrank_is_malformed(tmp_path: Path) -> None:
    name = tmp_path / "x"
    name.write_bytes(DATA)
    with open_source(str(name)) as file:
        os.truncate(name, 10)
        with pytest.raises(MalformedError, match=f"{name} .*truncated"):
            file.read(0, 1024)


def test_nothing_there(tmp_path: Path) -> None:
    for name in ("x", "folder/x"):
        with pytest.raises(MissingFileError, match=f"{tmp_path}/{name}; "):
            open_source(str(tmp_path / name))


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MalformedError, match=f"special .*{tmp_path}/pipe"):
        open_source(str(tmp_path / "pipe"))
    with pytest.raises(MalformedError, match=f"folder .*{tmp_path}$"):
        open_source(str(tmp_path))


def test_names_that_no_file_can_have() -> None:
    with pytest.raises(SourceError, match=r"'a\\x00b'"):
        open_source("a\0b")


@pytest.mark.parametrize(
    ("names", "error", "facts"),
    [
        (["x.pt-0.4", "x.pt-2.4"], MissingFileError, r"/x\.pt-1\.4\n.*/x\.pt-3\.4$"),
        (["x.pt-0.1", "x.pt-0.2", "x.pt-1.2"], MalformedError, r"\[1, 2\]"),
        (["x.pt-0.2", "x.pt-1.2", "x.pt-2.2"], MalformedError, "part 2 of 2"),
    ],
    ids=["missing", "of two runs", "past the count"],
)
def test_parts_that_are_not_those_of_one_file(names: list[str], error: type, facts: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(error, match=facts):
        open_source(str(tmp_path / "x.pt"))


def test_parts_are_in_order_of_their_number(tmp_path: Path) -> None:
    for index in range(12):
        (tmp_path / f"x.pt-{index}.12").write_bytes(b"%d," % index)
    with open_source(str(tmp_path / "x.pt")) as file:
        assert file.read(0, file.nbytes) == b"0,1,2,3,4,5,6,7,8,9,10,11,"


@pytest.mark.parametrize("name", ["x.pt-0.2.bak", "x.ptz-0.2", "x.pt-a.2", "x.pt-0"])
def test_other_names_are_no_parts(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    assert split_parts(str(tmp_path / "x.pt")) == ()


def test_the_file_itself_comes_before_its_parts(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"whole")
    (tmp_path / "x.pt-0.2").write_bytes(b"part")
    with open_source(str(tmp_path / "x.pt")) as file:
        assert file.read(0, 5) == b"whole"
