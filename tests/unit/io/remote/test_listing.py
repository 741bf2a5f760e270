"""Objects are listed, not asked for one by one; and seen afresh whenever a user names them."""

from __future__ import annotations

import pytest

from ucp.io.folder import names_in, parse_path
from ucp.io.remote import connections
from ucp.io.remote.connections import connect


@pytest.fixture
def requests(memory, monkeypatch):
    """What the store is asked."""
    asked = []
    link = connect("memory://")
    for name in ("info", "list", "find"):
        monkeypatch.setattr(link, name, counted(name, getattr(link, name), asked))
    return asked


def counted(name, call, asked):
    def counts(url):
        asked.append((name, url))
        return call(url)

    return counts


def fill(memory, names):
    for name in names:
        memory.fs.pipe_file(f"memory://b/run/{name}", b"x")


def test_a_folder_of_files_is_one_listing(memory, requests):
    fill(memory, [f"rank{n}.pt" for n in range(500)])
    root = parse_path("memory://b/run")
    assert root.is_dir()
    assert all((root / f"rank{n}.pt").is_file() and (root / f"rank{n}.pt").stat().st_size == 1 for n in range(500))
    assert requests == [("info", "memory://b/run"), ("list", "memory://b/run")]


def test_many_folders_are_one_listing_of_their_parent(memory, requests):
    fill(memory, [f"zero/p{n:04}/fp32.pt" for n in range(2000)])
    root = parse_path("memory://b/run")
    assert root.is_dir()
    assert all((root / "zero" / name / "fp32.pt").is_file() for name in names_in(root / "zero"))
    assert len(requests) < 600
    assert requests[-1] == ("find", "memory://b/run/zero")


def test_a_look_into_some_folders_lists_few_more(memory, requests):
    """Whoever names the folder of all runs by mistake is told at once, not after all of them were listed."""
    fill(memory, [f"step{n:04}/x/y.pt" for n in range(1000)])
    root = parse_path("memory://b/run")
    for name in sorted(names_in(root))[:50]:
        assert [own.name for own in (root / name).iterdir()] == ["x"]
    assert len(requests) <= 104
    assert {name for name, _ in requests} == {"list"}


def test_above_the_checkpoint_single_objects_are_asked_for(memory, requests):
    fill(memory, ["step1/x.pt", "latest"])
    root = parse_path("memory://b/run/step1")
    assert root.is_dir()
    assert (root.parent / "latest").is_file()
    assert not (root.parent / "none").exists()
    assert (root.parent / "latest").is_file()
    assert [name for name, _ in requests] == ["info"] * 3


def test_named_again_it_is_seen_afresh(memory):
    fill(memory, ["x.pt"])
    root = parse_path("memory://b/run")
    assert not (root / "y.pt").exists()
    fill(memory, ["y.pt"])
    assert not (root / "y.pt").exists()
    root = parse_path("memory://b/run")
    assert (root / "y.pt").exists()
    memory.fs.rm("memory://b/run", recursive=True)
    assert not parse_path("memory://b/run").exists()


def test_a_marker_object_of_a_folder_is_no_entry(memory, monkeypatch):
    fill(memory, ["x.pt"])
    link = connect("memory://")
    found = memory.fs.ls("memory://b/run", detail=True)
    monkeypatch.setattr(link.fs, "ls", lambda *_, **__: [{"name": "b/run/", "size": 0, "type": "file"}, *found])
    assert list(names_in(parse_path("memory://b/run"))) == ["x.pt"]


def test_a_child_makes_connections_of_its_own(memory):
    """What is done in a child when a process is forked, done here."""
    first = connect("memory://")
    connections._reset()
    assert connect("memory://") is not first
    assert first in connections._inherited
    connections._inherited.clear()
    first.close()


def test_nothing_lies_in_an_object_and_nothing_is_asked(memory, requests):
    fill(memory, ["model.safetensors"])
    root = parse_path("memory://b/run")
    assert list(names_in(root)) == ["model.safetensors"]
    assert not (root / "model.safetensors" / "x" / "y").exists()
    assert not (root / "no-folder" / "x").is_dir()
    assert requests == [("list", "memory://b/run")]
