from __future__ import annotations

import pytest


class Memory:
    """The store of memory:// URLs."""

    def __init__(self):
        fsspec = pytest.importorskip("fsspec", reason="torch brings it along")
        self.fs = fsspec.filesystem("memory")

    def put(self, folder, url):
        """Copy a folder, or a file; its URL."""
        files = [own for own in folder.rglob("*") if own.is_file()] if folder.is_dir() else [folder]
        for file in files:
            at = f"{url}/{file.relative_to(folder)}" if folder.is_dir() else url
            self.fs.pipe_file(at, file.read_bytes())
        return url


@pytest.fixture
def memory(monkeypatch):
    """The store, empty afterwards; nobody has named anything in it."""
    from ucp.io.files import close_connections
    from ucp.io.remote import listing

    monkeypatch.setattr(listing, "_listings", listing._Listings())
    own = Memory()
    yield own
    own.fs.store.clear()
    own.fs.pseudo_dirs[:] = [""]
    close_connections()
