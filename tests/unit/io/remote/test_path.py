"""`RemotePath` behaves as a `Path` of a folder on this machine does."""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath

import pytest

from ucp.errors import UsageError
from ucp.io.folder import is_url, names_in, parse_path, path_of, read_short_text, resolve_from
from ucp.io.remote.path import RemotePath

TREE = {"a.pt": b"12", "latest": b"step1\n", "step1/x.bin": b"abc", "step1/deep/y.bin": b"d", "step10/x.bin": b""}


@pytest.fixture
def both(memory, tmp_path):
    """The same tree on a disk and in a store."""
    root = tmp_path / "run"
    for name, data in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root, parse_path(memory.put(root, "memory://bucket/run"))


@pytest.mark.parametrize("name", ["", "a.pt", "step1", "step1/x.bin", "step1/deep", "nothing", "step1/nothing", "step"])
def test_is_there_as_on_a_disk(both, name):
    disk, store = (root / name if name else root for root in both)
    assert (store.exists(), store.is_dir(), store.is_file()) == (disk.exists(), disk.is_dir(), disk.is_file())
    assert sorted(names_in(store)) == sorted(names_in(disk))
    assert not store.is_symlink()


def test_bytes_and_text_as_on_a_disk(both):
    disk, store = both
    assert (store / "step1/x.bin").read_bytes() == b"abc"
    assert (store / "step1" / "x.bin").stat().st_size == 3
    assert (store / "latest").read_text() == (disk / "latest").read_text()
    assert read_short_text(store / "latest", most_bytes=10) == "step1"
    assert read_short_text(store / "latest", most_bytes=2) is None
    with (store / "a.pt").open("rb") as file:
        assert file.read() == b"12"
    assert sorted(own.name for own in store.glob("*.pt")) == ["a.pt"]
    assert [own.name for own in sorted(store.iterdir())] == ["a.pt", "latest", "step1", "step10"]


def test_absent_as_on_a_disk(both):
    _, store = both
    nothing = store / "no"
    for wrong in (nothing.stat, nothing.read_bytes, lambda: list(nothing.iterdir())):
        with pytest.raises(FileNotFoundError, match="bucket/run/no"):
            wrong()
    with pytest.raises(NotADirectoryError):
        list((store / "a.pt").iterdir())


@pytest.mark.parametrize("url", ["s3://b/run/step1", "gs://b/run/step1", "memory://b/run/step1"])
def test_lexical_parts_keep_the_url(url):
    path = path_of(url)
    root = url.removesuffix("/run/step1")
    assert str(path) == f"{path}" == path.__fspath__() == url
    assert str(path.parent) == f"{root}/run"
    assert [str(own) for own in path.parents][:2] == [f"{root}/run", root]
    assert str(path / "x" / "y.pt") == f"{url}/x/y.pt"
    assert str(path.joinpath("x")) == f"{url}/x"
    assert str(path.with_name("step2")) == f"{root}/run/step2"
    assert (path.name, path.suffix, (path / "y.pt").suffix, (path / "y.pt").stem) == ("step1", "", ".pt", "y")
    assert (path / "x/y").relative_to(path) == PurePosixPath("x/y")
    assert path.resolve() is path
    assert path.absolute() is path
    assert path.is_absolute()
    assert path == path_of(url + "/")
    assert hash(path) == hash(path_of(url))
    assert path < path / "a"
    assert path.parent in (path / "a").parents
    assert pickle.loads(pickle.dumps(path)) == path
    assert type(path / "x") is type(path.parent) is RemotePath


def test_what_is_a_url():
    assert [is_url(own) for own in ("s3://b/k", "/a/s3://b", "C:/x", "run/x", "s3:/b/k")] == [True, *[False] * 4]
    assert resolve_from(Path("/run"), "x") == Path("/run/x")
    assert str(resolve_from(Path("/run"), "s3://b/x")) == "s3://b/x"
    assert str(resolve_from(path_of("s3://b/run"), "x")) == "s3://b/run/x"
    assert resolve_from(path_of("s3://b/run"), "/local/x") == Path("/local/x")


@pytest.mark.parametrize(
    ("url", "facts"),
    [
        ("s3://key:secretsecret@bucket/x", "password; got s3://[^:]*bucket/x"),
        ("s3://bucket/x?X-Amz-Signature=secretsecret", "a query"),
        ("s3://bucket/x#secretsecret", "a query"),
        ("ftp://host/x", "s3://.*; got ftp://host/x"),
        ("https://host/x?token=secretsecret", "a query"),
        ("s3://bucket/../x", r"'\.\.' and '::'; got "),
        ("s3://bucket/x::zip://y", "'::'; got s3://bucket/x::zip"),
    ],
)
def test_urls_that_are_refused_are_not_repeated(url, facts):
    with pytest.raises(UsageError, match=facts) as caught:
        parse_path(url)
    assert "secretsecret" not in str(caught.value)
