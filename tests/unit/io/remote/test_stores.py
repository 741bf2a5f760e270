"""What libraries of stores are asked for, of doubles of them; tests/integration/storage runs them against servers."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from ucp.errors import ChangedError
from ucp.io.remote.listing import ListedObject
from ucp.io.remote.stores import store_class


def store(scheme, fs):
    """The connection to a double."""
    made = object.__new__(store_class(scheme))
    made.fs, made._files = fs, {}
    return made


SEEN = ListedObject(is_folder=False, nbytes=9, version="17")


class Google:
    """A file system of gcsfs that notes what it is asked, and answers or raises `answer`."""

    protocol = ("gs", "gcs")
    base = "http://host/storage/v1/"

    def __init__(self, answer=b""):
        self.answer = answer
        self.asked = []

    def url(self, key):
        return f"http://host/{key}"

    def call(self, *words, **asked):
        self.asked.append((words, asked))
        if isinstance(self.answer, Exception):
            raise self.answer
        return {}, self.answer


def test_google_is_asked_for_one_generation():
    fs = Google(b"abc")
    assert store("gs", fs).fetch("gs://bucket/x", SEEN, 2, 5) == b"abc"
    asked = {"headers": {"Range": "bytes=2-4"}, "ifGenerationMatch": "17"}
    assert fs.asked == [(("GET", "http://host/bucket/x"), asked)]


@pytest.mark.parametrize("error", [FileExistsError("412"), FileNotFoundError("404")])
def test_another_generation_is_refused(error):
    with pytest.raises(ChangedError, match="gs://bucket/x "):
        store("gcs", Google(error)).fetch("gs://bucket/x", SEEN, 0, 1)


@pytest.mark.parametrize("new", [False, True])
def test_small_objects_go_to_google_as_they_are(new):
    fs = Google()
    store("gs", fs).put("bucket/a/b", b"ends in CR\r", new=new)
    ((words, asked),) = fs.asked
    assert words == ("POST", "http://host/upload/storage/v1/b/{}/o", "bucket")
    assert asked["data"] == b"ends in CR\r"
    assert (asked["uploadType"], asked["name"], asked.get("ifGenerationMatch")) == (
        "media",
        "a/b",
        "0" if new else None,
    )


@pytest.mark.parametrize("nbytes", [6 << 20, 81 << 30, 1 << 40])
def test_parts_are_such_as_stores_take(nbytes, tmp_path):
    (tmp_path / "x").touch()
    os.truncate(tmp_path / "x", nbytes)
    asked = {}
    for scheme in ("gs", "s3"):
        fs = SimpleNamespace(put_file=lambda *_, scheme=scheme, **options: asked.update({scheme: options["chunksize"]}))
        store(scheme, fs).put_file("bucket/x", str(tmp_path / "x"))
    assert asked["gs"] % (256 << 10) == 0
    assert -(-nbytes // asked["s3"]) <= 10_000


@pytest.mark.parametrize(
    ("key", "inside", "root", "pinned"),
    [
        ("org/name", "", "org/name", "org/name@c0ffee"),
        ("org/name@refs/pr/1/a/b.json", "a/b.json", "org/name@refs/pr/1", "org/name@c0ffee"),
        ("datasets/org/name@dev/x", "x", "datasets/org/name@dev", "datasets/org/name@c0ffee"),
    ],
)
def test_a_revision_is_read_at_its_commit(monkeypatch, key, inside, root, pinned):
    hub = pytest.importorskip("huggingface_hub")
    asked = SimpleNamespace(repo_info=lambda *_, **__: SimpleNamespace(sha="c0ffee"))
    monkeypatch.setattr(hub, "HfApi", lambda **_: asked)
    resolved = SimpleNamespace(path_in_repo=inside, repo_id="org/name", revision="main", repo_type="model")
    fs = SimpleNamespace(resolve_path=lambda _: resolved, endpoint="", token=None)
    assert store("hf", fs)._pin(key) == (root, pinned)
