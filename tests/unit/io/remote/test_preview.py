"""Files that are not uploaded yet are seen at their URLs, until they are done."""

from __future__ import annotations

import pytest

from ucp.io.files import close_connections
from ucp.io.folder import path_of
from ucp.io.remote.connections import preview
from ucp.io.remote.listing import forget

ROOT = "memory://bucket/a"


@pytest.fixture
def files(tmp_path, memory):
    (tmp_path / "last").write_text("new")
    memory.fs.pipe_file(f"{ROOT}/first", b"old")
    memory.fs.pipe_file(f"{ROOT}/.ucp-partial/owner", b"x")
    return {"last": tmp_path / "last"}


def seen():
    forget(ROOT)
    return sorted(path.name for path in path_of(ROOT).iterdir())


def test_files_are_seen_while_it_lasts(files):
    with preview(ROOT, files, hidden=".ucp-partial"):
        assert seen() == ["first", "last"]
        assert (path_of(ROOT) / "last").read_text() == "new"
        close_connections()  # connections may end meanwhile
        assert seen() == ["first", "last"]
    assert seen() == [".ucp-partial", "first"]
