from __future__ import annotations

import os

import pytest

from ucp.errors import MissingFileError
from ucp.io.provenance import identity_of, size_and_time


def test_both_ends_and_the_length_are_looked_at(tmp_path):
    path = tmp_path / "f"
    found = set()
    for data in (bytes(200_000), b"\x01" + bytes(199_999), bytes(199_998) + b"\x01\x00", bytes(200_001)):
        path.write_bytes(data)
        found.add(identity_of(str(path)))
    assert len(found) == 4


def test_the_middle_is_not(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(200_000))
    before = identity_of(str(path))
    path.write_bytes(bytes(100_000) + b"\x01" + bytes(99_999))
    assert identity_of(str(path)) == before


def test_an_empty_file_has_one(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    assert len(identity_of(str(tmp_path / "f"))) == 32


def test_a_file_in_parts_is_one(tmp_path):
    (tmp_path / "whole").write_bytes(b"abcdef")
    for n, part in enumerate((b"ab", b"cde", b"f")):
        (tmp_path / f"x-{n}.3").write_bytes(part)
    os.utime(tmp_path / "x-1.3", ns=(5, 5))
    assert identity_of(str(tmp_path / "x")) == identity_of(str(tmp_path / "whole"))
    nbytes, mtime_ns = size_and_time(str(tmp_path / "x"))
    assert nbytes == 6
    assert mtime_ns == max((tmp_path / f"x-{n}.3").stat().st_mtime_ns for n in range(3))


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        size_and_time(str(tmp_path / "nope"))
    with pytest.raises(MissingFileError, match="/nope"):
        identity_of(str(tmp_path / "nope"))
