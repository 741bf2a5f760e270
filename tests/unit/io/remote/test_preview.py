"""Files that are not uploaded yet are seen at their URLs, by as many readers as there are, until they are done."""

from __future__ import annotations

import pytest

from ucp.io.files import let_go
from ucp.io.folder import path_of
from ucp.io.remote.preview import preview

ROOTS = ("memory://bucket/a", "memory://bucket/b")


@pytest.fixture
def files(tmp_path, memory):
    (tmp_path / "last").write_text("new")
    for root in ROOTS:
        memory.fs.pipe_file(f"{root}/first", b"old")
        memory.fs.pipe_file(f"{root}/.ucp-partial/owner", b"x")
    return {"last": tmp_path / "last"}


def seen(root):
    return sorted(path.name for path in path_of(root).iterdir())


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_at_a_time_end_in_any_order(files, first_to_end):
    previews = [preview(root, files, hidden=".ucp-partial") for root in ROOTS]
    for each in previews:
        each.__enter__()
    assert [seen(root) for root in ROOTS] == [["first", "last"]] * 2
    previews[first_to_end].__exit__(None, None, None)
    other = ROOTS[1 - first_to_end]
    assert seen(ROOTS[first_to_end]) == [".ucp-partial", "first"]
    assert seen(other) == ["first", "last"]
    assert (path_of(other) / "last").read_text() == "new"
    previews[1 - first_to_end].__exit__(None, None, None)
    assert seen(other) == [".ucp-partial", "first"]


def test_connections_may_end_meanwhile(files):
    with preview(ROOTS[0], files, hidden=".ucp-partial"):
        let_go()
        assert seen(ROOTS[0]) == ["first", "last"]
    assert seen(ROOTS[0]) == [".ucp-partial", "first"]
