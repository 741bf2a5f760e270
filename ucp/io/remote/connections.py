"""Connections to stores: one per scheme and process, opened when first needed.

They are closed before processes are forked, because a child that inherits open connections would disturb its parent's.
After any other fork, the child opens new ones and leaves those of the parent alone.

Closing aborts the requests of other threads. So a conversion that forks holds `fork_lock()` while it runs, and other
conversions wait for it; a thread that only reads is not protected.
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

from ucp.io.remote.failures import translate_errors
from ucp.io.remote.stores import THREADS, ObjectVersion, Store, store_class
from ucp.io.remote.url import key_of, scheme_of

_connections: dict[str, Store] = {}
_preview: tuple[str, Mapping[str, Path], str] | None = None
"""Prefix, new files and hidden folder, while `preview` is active."""
_lock = threading.Lock()
_fork_lock = threading.RLock()
_inherited: list[Store] = []
"""In a child, the connections of its parent, which it must not close."""


def connect(url: str) -> Store:
    """The connection to the store of a URL, opened if needed. Raises MissingLibraryError."""
    scheme = scheme_of(url)
    with _lock:
        if scheme not in _connections:
            with translate_errors(url):
                _connections[scheme] = store_class(scheme)(scheme)
        connection = _connections[scheme]
        if _preview is not None and f"{url}/".startswith(f"{_preview[0]}/"):
            return cast("Store", _Preview(connection, *_preview[1:]))
        return connection


def refresh(url: str) -> None:
    """Have the connection to the store of a URL, if open, forget what it cached."""
    if (connection := _connections.get(scheme_of(url))) is not None:
        connection.refresh()


def fork_lock() -> threading.RLock:
    """The lock that a conversion with stores holds while it may fork."""
    return _fork_lock


@contextmanager
def preview(root: str, files: Mapping[str, Path], *, hidden: str) -> Iterator[None]:
    """Show a prefix as it will be: with `files`, and without its folder `hidden`, which marks it as unfinished.

    So a destination is read back before its metadata files make it a checkpoint for others. `files`: path below the URL
    `root` to local path. One at a time, under `fork_lock()`.
    """
    global _preview  # noqa: PLW0603  # of this process, whichever connections there are
    _preview = root, {f"{root}/{path}": file for path, file in files.items()}, f"{root}/{hidden}"
    try:
        yield
    finally:
        _preview = None


class _Preview:
    """A connection that also shows files which are not uploaded yet."""

    def __init__(self, connection: Store, new: Mapping[str, Path], hidden: str) -> None:
        self._connection = connection
        self._new = new
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def info(self, url: str) -> Mapping[str, Any] | None:
        if url in self._new:
            return self._file(url)
        if self._is_hidden(url):
            return None
        details = self._connection.info(url)
        is_folder = details is None and any(new.startswith(f"{url}/") for new in self._new)
        return {"name": key_of(url), "size": 0, "type": "directory"} if is_folder else details

    def list(self, url: str) -> dict[str, Mapping[str, Any]] | None:
        listing = self._connection.list(url)
        inside = {name: entry for name, entry in (listing or {}).items() if not self._is_hidden(f"{url}/{name}")}
        for new in self._new:
            if new.startswith(f"{url}/"):
                name = new[len(url) + 1 :].partition("/")[0]
                details = self.info(f"{url}/{name}")
                if details is not None:
                    inside[name] = details
        return inside if inside or listing is not None else None

    def find(self, url: str) -> dict[str, Mapping[str, Any]]:
        objects = {
            name: entry for name, entry in self._connection.find(url).items() if not self._is_hidden(f"{url}/{name}")
        }
        return objects | {new[len(url) + 1 :]: self._file(new) for new in self._new if new.startswith(f"{url}/")}

    def fetch(self, url: str, listed: ObjectVersion, start: int, stop: int) -> bytes:
        if url not in self._new:
            return self._connection.fetch(url, listed, start, stop)
        with self._new[url].open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def _file(self, url: str) -> Mapping[str, Any]:
        status = self._new[url].stat()
        version = f"{status.st_ino}-{status.st_mtime_ns}"  # so that no cached bytes of an older object are used
        return {"name": key_of(url), "size": status.st_size, "type": "file", "ETag": version}

    def _is_hidden(self, url: str) -> bool:
        return f"{url}/".startswith(f"{self._hidden}/")


def close_connections() -> None:
    """Close all connections of this process: before a fork, and at exit. The next use opens new ones.

    Python calls a thread ended before C libraries (OpenSSL) have freed its data, for which they hold locks: a child
    forked at that moment would wait for the locks forever. So this waits until the threads are gone from Linux, too.
    """
    threads = [thread.native_id for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    while _connections:
        _connections.popitem()[1].close()
    deadline = time.monotonic() + 1
    while any(os.path.exists(f"/proc/self/task/{number}") for number in threads) and time.monotonic() < deadline:
        time.sleep(0.001)


def _reset() -> None:
    """In a child: leave the connections and locks of the parent alone."""
    global _lock, _fork_lock  # noqa: PLW0603  # of this process
    _inherited.extend(_connections.values())
    _connections.clear()
    _lock = threading.Lock()
    _fork_lock = threading.RLock()


atexit.register(close_connections)
os.register_at_fork(after_in_child=_reset)
