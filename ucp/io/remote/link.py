"""Connections to stores: one per scheme and process, made when first needed, by the library of fsspec for it.

Each has an event loop and threads of its own, so that it can be hung up before processes are forked: a child that
inherited open connections would disturb those of its parent. After a fork that nobody told us of, the child makes new
ones and leaves the old alone.

Hanging up breaks off what other threads of the process do there. So a conversion that forks has `forking()` while it
runs, and others wait for it; a thread that only reads is not protected.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from ucp.io.remote.failures import changed, cut_short, missing_library, told
from ucp.io.remote.stores import REQUESTS, Fetch, Seen, store_of
from ucp.io.remote.url import key_of, scheme_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["Link", "View", "add_view", "forking", "hang_up", "link_of", "remove_view", "see_afresh", "version_of"]

_THREADS = "ucp-remote"
"""What the names of our threads begin with."""


def version_of(details: Mapping[str, Any]) -> str:
    """What changes whenever the bytes of an object do, of what a store says of it; empty where it has no such thing."""
    found = next((details[key] for key in ("ETag", "generation", "etag", "blob_id") if details.get(key)), "")
    return str(found).strip('"')


class Link:
    """A connection to the stores of one scheme."""

    def __init__(self, scheme: str) -> None:
        """Raises MissingLibraryError."""
        self._own = store_of(scheme)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._fs = self._made(scheme)
        self._files: dict[tuple[str, Seen], Fetch] = {}
        self._pins: dict[str, str] = {}
        self._pinning = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @property
    def store(self) -> Any:
        """The file system of fsspec for it, to write to."""
        return self._fs

    def info(self, url: str) -> Mapping[str, Any] | None:
        """What is said of one object or folder; None for nothing. Raises SourceError."""
        with told(url):
            try:
                return cast("Mapping[str, Any]", self._fs.info(self._key(url)))
            except (FileNotFoundError, NotImplementedError):  # the latter: where there can be nothing but repositories
                return None

    def list(self, url: str) -> dict[str, Mapping[str, Any]] | None:
        """Names in a folder, with what is said of each; None where there is no folder. Raises SourceError."""
        with told(url):
            try:
                key = self._key(url)
                found = self._fs.ls(key, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return None
        inside = {_name(own): own for own in found if _path(own) != key}
        return inside if inside or not found else None

    def find(self, url: str) -> dict[str, Mapping[str, Any]]:
        """Every object below a folder, by its path from there, with what is said of it. Raises SourceError."""
        with told(url):
            key = self._key(url)
            found = self._fs.find(key, detail=True)
        return {_path(own)[len(key) + 1 :]: own for own in found.values()}

    def fetch(self, url: str, seen: Seen, start: int, stop: int) -> bytes:
        """Bytes of an object, as long as it is the one that was seen. Raises SourceError, ChangedError.

        S3 and Google's store are asked for the bytes of that version alone; of others the version is compared before
        the first read. At the end all are compared once more (`ucp.io.identity.check_unchanged`).
        """
        with told(url):
            data = self._fetcher(url, seen)(start, stop) or b""  # nothing when it was broken off
        if len(data) != stop - start:
            raise cut_short(url, expected=stop - start, got=len(data))
        return data

    def see_afresh(self) -> None:
        """Take the newest state of a repository for what is asked next."""
        with self._pinning:
            self._pins.clear()

    def submit(self, call: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Have one of our threads do it."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix=_THREADS)
        return self._pool.submit(call, *arguments)

    def close(self) -> None:
        """End connections and threads; what is still under way is broken off."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_broken_off(), self._loop).result()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._files.clear()
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_closed(self._fs), self._loop).result()
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _fetcher(self, url: str, seen: Seen) -> Fetch:
        found = self._files.get((url, seen))
        return found or self._files.setdefault((url, seen), self._opened(url, seen))

    def _opened(self, url: str, seen: Seen) -> Fetch:
        key = self._key(url)
        if self._own.reads is not None and seen.version:
            return self._own.reads(self._fs, key, seen)
        file = self._fs.open(key, "rb", cache_type="none")
        if _differs(file.details if hasattr(file, "cache") else self._fs.info(key), seen):
            raise changed(url)
        if hasattr(file, "cache"):
            return cast("Fetch", file.cache.fetcher)
        return lambda start, stop: cast("bytes", self._fs.cat_file(key, start=start, end=stop))

    def _key(self, url: str) -> str:
        """What the store calls it; where there are states of a whole repository, in the one that was seen first."""
        key = key_of(url)
        if self._own.pinned is None:
            return key
        with self._pinning:
            root = next((own for own in self._pins if key == own or key.startswith(f"{own}/")), None)
            if root is None:
                root, self._pins[root] = self._own.pinned(self._fs, key)
            return self._pins[root] + key[len(root) :]

    def _made(self, scheme: str) -> AbstractFileSystem:
        try:
            kind = self._own.kind(scheme)
            options = {"skip_instance_cache": True, "use_listings_cache": False, **self._own.options()}
        except ImportError:
            raise missing_library(scheme) from None
        if getattr(kind, "async_impl", False):
            self._loop = options["loop"] = asyncio.new_event_loop()
            self._loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix=_THREADS))
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"{_THREADS}-loop", daemon=True)
            self._thread.start()
        fs = kind(**options)
        for name, value in self._own.settings.items():
            setattr(fs, name, value)
        return fs


async def _broken_off() -> None:
    """End all requests that are under way."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def _closed(fs: Any) -> None:
    """Close what a file system of s3fs or gcsfs has open; neither has a call for that which waits until it is done."""
    if getattr(fs, "_s3creator", None) is not None:
        await fs._s3creator.__aexit__(None, None, None)  # noqa: SLF001
    if getattr(fs, "_session", None) is not None:
        await fs._session.close()  # noqa: SLF001


View = Callable[[Link], Link]
"""Makes of a connection one that sees something else in places."""

_links: dict[str, Link] = {}
_views: list[tuple[str, View]] = []
"""Scheme and view, for each that is to be seen through."""
_lock = threading.Lock()
_forking = threading.RLock()
_left: list[Link] = []
"""Those of the parent, in a child: never closed there, as that would be seen by the parent."""


def link_of(url: str) -> Link:
    """The connection to the store of a URL, made if there is none, seen through all views.

    Raises MissingLibraryError.
    """
    scheme = scheme_of(url)
    with _lock:
        if scheme not in _links:
            with told(url):
                _links[scheme] = Link(scheme)
        link = _links[scheme]
        for of, view in _views:
            link = view(link) if of == scheme else link
        return link


def see_afresh(url: str) -> None:
    """Have the connection to the store of a URL, if there is one, keep to nothing that it saw."""
    if (own := _links.get(scheme_of(url))) is not None:
        own.see_afresh()


def add_view(url: str, view: View) -> None:
    """See the store of a URL through `view`, in all threads, whichever connection there is, until it is removed."""
    with _lock:
        _views.append((scheme_of(url), view))


def remove_view(url: str, view: View) -> None:
    """No longer see the store of a URL through `view`."""
    with _lock:
        _views.remove((scheme_of(url), view))


def forking() -> threading.RLock:
    """The lock of a conversion that uses stores and forks processes; one without it leaves connections alone."""
    return _forking


def hang_up() -> None:
    """End all connections of this process: before it is forked, and when it ends. The next use makes new ones."""
    threads = [own.native_id for own in threading.enumerate() if own.name.startswith(_THREADS)]
    while _links:
        _links.popitem()[1].close()
    _wait_until_gone(threads)


def _wait_until_gone(threads: Iterable[int | None]) -> None:
    """Wait until threads that end have ended for the system too (Linux).

    Python calls a thread ended before what C libraries keep for it is freed, under locks of theirs (OpenSSL): a child
    that is forked meanwhile would wait for those for ever.
    """
    deadline = time.monotonic() + 1
    while any(os.path.exists(f"/proc/self/task/{own}") for own in threads) and time.monotonic() < deadline:
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


def _differs(now: Mapping[str, Any], seen: Seen) -> bool:
    return (now["size"], version_of(now)) != (seen.nbytes, seen.version)


def _path(own: Mapping[str, Any]) -> str:
    return str(own["name"]).strip("/")


def _name(own: Mapping[str, Any]) -> str:
    return _path(own).rpartition("/")[2]
