"""A prefix of a store as it will be: with objects that are not written yet, and without what marks it as unfinished.

Who reads back what a conversion wrote, before its last files make it a checkpoint for others, sees these here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ucp.io.remote.link import Link, add_view, remove_view
from ucp.io.remote.listing import forget
from ucp.io.remote.stores import Seen
from ucp.io.remote.url import key_of

__all__ = ["preview"]


@contextmanager
def preview(root: str, files: Mapping[str, Path], *, hidden: str) -> Iterator[None]:
    """See `files` (path below the URL `root` to where it lies on this disk), and nothing below the folder `hidden`."""
    new = {f"{root}/{path}": file for path, file in files.items()}

    def view(link: Link) -> Link:
        return _Preview(link, new, f"{root}/{hidden}")

    add_view(root, view)
    forget(root)
    try:
        yield
    finally:
        remove_view(root, view)
        forget(root)


class _Preview(Link):
    """A connection, and what is not there yet."""

    def __init__(self, link: Link, new: Mapping[str, Path], hidden: str) -> None:
        self._link = link
        self._new = new
        self._hidden = hidden
        self._fs = link.store
        self.submit = link.submit  # type: ignore[method-assign]
        self.close = link.close  # type: ignore[method-assign]
        self.see_afresh = link.see_afresh  # type: ignore[method-assign]

    def info(self, url: str) -> Mapping[str, Any] | None:
        if url in self._new:
            return self._entry(url)
        if self._is_hidden(url):
            return None
        found = self._link.info(url)
        if found is None and any(own.startswith(f"{url}/") for own in self._new):
            return {"name": key_of(url), "size": 0, "type": "directory"}
        return found

    def list(self, url: str) -> dict[str, Mapping[str, Any]] | None:
        found = self._link.list(url)
        inside = {name: own for name, own in (found or {}).items() if not self._is_hidden(f"{url}/{name}")}
        for own in self._new:
            if own.startswith(f"{url}/"):
                name, slash, _ = own[len(url) + 1 :].partition("/")
                at = f"{url}/{name}"
                folder = {"name": key_of(at), "size": 0, "type": "directory"}
                inside.setdefault(name, folder) if slash else inside.update({name: self._entry(own)})
        return inside if inside or found is not None else None

    def find(self, url: str) -> dict[str, Mapping[str, Any]]:
        found = {name: own for name, own in self._link.find(url).items() if not self._is_hidden(f"{url}/{name}")}
        return found | {own[len(url) + 1 :]: self._entry(own) for own in self._new if own.startswith(f"{url}/")}

    def fetch(self, url: str, seen: Seen, start: int, stop: int) -> bytes:
        file = self._new.get(url)
        if file is None:
            return self._link.fetch(url, seen, start, stop)
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, stop - start, start)
        finally:
            os.close(descriptor)

    def _entry(self, url: str) -> Mapping[str, Any]:
        status = self._new[url].stat()
        version = f"{status.st_ino}-{status.st_mtime_ns}"  # what was read of another of that name is not taken for it
        return {"name": key_of(url), "size": status.st_size, "type": "file", "ETag": version}

    def _is_hidden(self, url: str) -> bool:
        return url == self._hidden or url.startswith(f"{self._hidden}/")
