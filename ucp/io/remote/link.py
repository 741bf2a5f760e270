"""Connections to stores: one per scheme and process, made when first needed.

Each can be hung up before processes are forked: a child that inherited open connections would disturb those of its
parent. After a fork that nobody told us of, the child makes new ones and leaves the old alone.

Hanging up breaks off what other threads of the process do there. So a conversion that forks has `forking()` while it
runs, and others wait for it; a thread that only reads is not protected.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ucp.io.remote.failures import told
from ucp.io.remote.stores import THREADS, Seen, Store, store_class
from ucp.io.remote.url import key_of, scheme_of

_links: dict[str, Store] = {}
_preview: tuple[str, Mapping[str, Path], str] | None = None
"""Prefix, new files and hidden folder of it, while it is seen as it will be."""
_lock = threading.Lock()
_forking = threading.RLock()
_left: list[Store] = []
"""Those of the parent, in a child: never closed there, as that would be seen by the parent."""


def link_of(url: str) -> Store:
    """The connection to the store of a URL, made if there is none. Raises MissingLibraryError."""
    scheme = scheme_of(url)
    with _lock:
        if scheme not in _links:
            with told(url):
                _links[scheme] = store_class(scheme)(scheme)
        link = _links[scheme]
        if _preview is not None and f"{url}/".startswith(f"{_preview[0]}/"):
            return cast("Store", _Preview(link, *_preview[1:]))
        return link


def see_afresh(url: str) -> None:
    """Have the connection to the store of a URL, if there is one, keep to nothing that it saw."""
    if (link := _links.get(scheme_of(url))) is not None:
        link.see_afresh()


def forking() -> threading.RLock:
    """The lock of a conversion that uses stores and forks processes; one without it leaves connections alone."""
    return _forking


@contextmanager
def preview(root: str, files: Mapping[str, Path], *, hidden: str) -> Iterator[None]:
    """See a prefix as it will be: with `files`, and nothing of its folder `hidden`, which marks it as unfinished.

    Who reads back what a conversion wrote, before its last files make it a checkpoint for others, sees these here.
    `files`: path below the URL `root` to where it lies on this disk. One at a time, as `forking()` has it.
    """
    global _preview  # noqa: PLW0603  # of this process, whichever connections there are
    _preview = root, {f"{root}/{path}": file for path, file in files.items()}, f"{root}/{hidden}"
    try:
        yield
    finally:
        _preview = None


class _Preview:
    """A connection, and what is not there yet."""

    def __init__(self, link: Store, new: Mapping[str, Path], hidden: str) -> None:
        self._link = link
        self._new = new
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def info(self, url: str) -> Mapping[str, Any] | None:
        if url in self._new:
            return self._file(url)
        if self._is_hidden(url):
            return None
        details = self._link.info(url)
        is_folder = details is None and any(new.startswith(f"{url}/") for new in self._new)
        return {"name": key_of(url), "size": 0, "type": "directory"} if is_folder else details

    def list(self, url: str) -> dict[str, Mapping[str, Any]] | None:
        there = self._link.list(url)
        inside = {name: entry for name, entry in (there or {}).items() if not self._is_hidden(f"{url}/{name}")}
        for new in self._new:
            if new.startswith(f"{url}/"):
                name = new[len(url) + 1 :].partition("/")[0]
                details = self.info(f"{url}/{name}")
                if details is not None:
                    inside[name] = details
        return inside if inside or there is not None else None

    def find(self, url: str) -> dict[str, Mapping[str, Any]]:
        there = {name: entry for name, entry in self._link.find(url).items() if not self._is_hidden(f"{url}/{name}")}
        return there | {new[len(url) + 1 :]: self._file(new) for new in self._new if new.startswith(f"{url}/")}

    def fetch(self, url: str, seen: Seen, start: int, stop: int) -> bytes:
        if url not in self._new:
            return self._link.fetch(url, seen, start, stop)
        with self._new[url].open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def _file(self, url: str) -> Mapping[str, Any]:
        status = self._new[url].stat()
        version = f"{status.st_ino}-{status.st_mtime_ns}"  # what was read of another of that name is not taken for it
        return {"name": key_of(url), "size": status.st_size, "type": "file", "ETag": version}

    def _is_hidden(self, url: str) -> bool:
        return f"{url}/".startswith(f"{self._hidden}/")


def hang_up() -> None:
    """End all connections of this process: before it is forked, and when it ends. The next use makes new ones.

    Python calls a thread ended before what C libraries keep for it is freed, under locks of theirs (OpenSSL): a child
    that is forked meanwhile would wait for those for ever. So this waits until the system (Linux) says so, too.
    """
    threads = [thread.native_id for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    while _links:
        _links.popitem()[1].close()
    deadline = time.monotonic() + 1
    while any(os.path.exists(f"/proc/self/task/{number}") for number in threads) and time.monotonic() < deadline:
        time.sleep(0.001)


def _start_anew() -> None:
    """In a child: leave what the parent has open, and whatever its threads held."""
    global _lock, _forking  # noqa: PLW0603  # of this process
    _left.extend(_links.values())
    _links.clear()
    _lock = threading.Lock()
    _forking = threading.RLock()


atexit.register(hang_up)
os.register_at_fork(after_in_child=_start_anew)
