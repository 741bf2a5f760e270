"""A connection to the stores of one scheme, by the library of fsspec for it, and what is particular about each.

Each has an event loop and threads of its own, so that it can be closed before processes are forked.

Retries with growing pauses are the libraries' own. Of S3, botocore makes a request that failed or was throttled three
times (`AWS_MAX_ATTEMPTS`, `AWS_RETRY_MODE`), s3fs that three times, and an answer that broke off three times: its own
five would be 25, and half an hour before a dead store is told of. gcsfs makes six, huggingface_hub five.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ucp.errors import AccessError, ConnectionLostError
from ucp.io.remote.failures import changed, missing_library, told
from ucp.io.remote.url import bucket_of, key_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_REQUESTS = 16
"""Requests under way at once, in one process."""

PART = 8 << 20
"""Bytes of one part of an upload, unless the file would have too many of them."""
PARTS = 4
"""Parts of a file that are under way at once, or that go in one request."""
_MOST_PARTS = 10_000
"""Parts that S3 allows."""
_WHOLE = 5 << 20
"""Bytes up to which a file is sent to Google's store in one request, as gcsfs has it."""

_TRIES = 3
"""Times that botocore and s3fs each try."""

_CONNECT = 15.0
_SILENCE = 30.0
"""Seconds in which Google's store has to take a connection, and to say something; gcsfs waits for ever."""

THREADS = "ucp-remote"
"""What the names of our threads begin with."""

Fetch = Callable[[int, int], bytes]
"""Bytes from the first to before the last."""


class Seen(Protocol):
    """What a listing said of an object."""

    @property
    def nbytes(self) -> int:
        """Bytes."""

    @property
    def version(self) -> str:
        """ETag or the like; empty where the store has none."""


def version_of(details: Mapping[str, Any]) -> str:
    """What changes whenever the bytes of an object do, of what a store says of it; empty where it has no such thing."""
    tag = next((details[key] for key in ("ETag", "generation", "etag", "blob_id") if details.get(key)), "")
    return str(tag).strip('"')


class Store:
    """A connection to the stores of one scheme; any of fsspec, of which versions are compared before they are read."""

    def __init__(self, scheme: str) -> None:
        """Raises MissingLibraryError."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        try:
            kind = self._library(scheme)
            options = {"skip_instance_cache": True, "use_listings_cache": False, **self._options()}
        except ImportError:
            raise missing_library(scheme) from None
        if getattr(kind, "async_impl", False):
            self._loop = options["loop"] = asyncio.new_event_loop()
            self._loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix=THREADS))
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"{THREADS}-loop", daemon=True)
            self._thread.start()
        self.fs: Any = kind(**options)
        self._files: dict[tuple[str, Seen], Fetch] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def info(self, url: str) -> Mapping[str, Any] | None:
        """What is said of one object or folder; None for nothing. Raises SourceError."""
        with told(url):
            try:
                return cast("Mapping[str, Any]", self.fs.info(self._key(url)))
            except (FileNotFoundError, NotImplementedError):  # the latter: where there can be nothing but repositories
                return None

    def list(self, url: str) -> dict[str, Mapping[str, Any]] | None:
        """Names in a folder, with what is said of each; None where there is no folder. Raises SourceError."""
        with told(url):
            try:
                key = self._key(url)
                details = self.fs.ls(key, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return None
        paths = {str(entry["name"]).strip("/"): entry for entry in details}
        inside = {path.rpartition("/")[2]: entry for path, entry in paths.items() if path != key}
        return inside if inside or not details else None

    def find(self, url: str) -> dict[str, Mapping[str, Any]]:
        """Every object below a folder, by its path from there, with what is said of it. Raises SourceError."""
        with told(url):
            key = self._key(url)
            details = self.fs.find(key, detail=True).values()
        return {str(entry["name"]).strip("/")[len(key) + 1 :]: entry for entry in details}

    def fetch(self, url: str, seen: Seen, start: int, stop: int) -> bytes:
        """Bytes of an object, as long as it is the one that was seen. Raises SourceError, ChangedError.

        S3 and Google's store are asked for the bytes of that version alone; of others the version is compared before
        the first read. At the end all are compared once more (`ucp.io.provenance.check_unchanged`).
        """
        with told(url):
            fetch = self._files.get((url, seen)) or self._files.setdefault((url, seen), self._open(url, seen))
            data = fetch(start, stop) or b""  # nothing when it was broken off
        if len(data) != stop - start:
            raise ConnectionLostError(f"expected {stop - start} bytes of {url}; the store gave {len(data)}. Try again")
        return data

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        """Write a small object; `new`: only where there is none. Raises FileExistsError, what the library raises."""
        self.fs.pipe_file(key, data, **({"mode": "create"} if new else {}))

    def put_file(self, key: str, path: str) -> None:
        """Upload a file."""
        self.fs.put_file(path, key)

    def abort_uploads(self, url: str) -> None:
        """End uploads below a URL that a process which is gone has left unfinished."""

    def see_afresh(self) -> None:
        """Take the newest state of a repository for what is asked next."""

    def submit(self, call: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Have one of our threads do it."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix=THREADS)
        return self._pool.submit(call, *arguments)

    def close(self) -> None:
        """End connections and threads; what is still under way is broken off."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._files.clear()
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _library(self, scheme: str) -> type[AbstractFileSystem]:
        """Its file system of fsspec. Raises ImportError."""
        from fsspec import get_filesystem_class

        return cast("type[AbstractFileSystem]", get_filesystem_class(scheme))

    def _options(self) -> dict[str, object]:
        """How that is made."""
        return {}

    def _key(self, url: str) -> str:
        """What the store calls it."""
        return key_of(url)

    def _open(self, url: str, seen: Seen) -> Fetch:
        """What reads the version of an object that was seen. Raises ChangedError."""
        key = self._key(url)
        file = self.fs.open(key, "rb", cache_type="none")
        now = file.details if hasattr(file, "cache") else self.fs.info(key)
        if (now["size"], version_of(now)) != (seen.nbytes, seen.version):
            raise changed(url)
        if hasattr(file, "cache"):
            return cast("Fetch", file.cache.fetcher)
        return lambda start, stop: cast("bytes", self.fs.cat_file(key, start=start, end=stop))

    async def _close(self) -> None:
        """Close what the file system has open."""


class _S3(Store):
    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self.fs.retries = _TRIES

    def _options(self) -> dict[str, object]:
        """How botocore goes about it, unless the environment says otherwise."""
        options: dict[str, object] = {"max_pool_connections": _REQUESTS}
        if not os.environ.keys() & {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"}:
            options["retries"] = {"mode": "standard", "total_max_attempts": _TRIES}
        return {"config_kwargs": options}

    def _open(self, url: str, seen: Seen) -> Fetch:
        """Nothing is asked of the store when the object is opened; another version is refused (`If-Match`)."""
        if not seen.version:
            return super()._open(url, seen)
        key, etag = key_of(url), f'"{seen.version}"'
        file = self.fs.open(key, "rb", cache_type="none", size=seen.nbytes)
        file.details = {"name": key, "type": "file", "size": seen.nbytes, "ETag": etag}
        file.read_kw = {**file.read_kw, "IfMatch": etag}
        return cast("Fetch", file.cache.fetcher)

    def put_file(self, key: str, path: str) -> None:
        """In parts of one size, of which there may not be too many."""
        chunk = max(PART, -(-os.stat(path).st_size // _MOST_PARTS))
        self.fs.put_file(path, key, chunksize=chunk, max_concurrency=PARTS)

    def abort_uploads(self, url: str) -> None:
        """Nobody sees them, but they are stored. Who may not list them leaves them to the bucket's life cycle rule."""
        bucket, prefix = bucket_of(url), key_of(url).partition("/")[2]
        with suppress(AccessError), told(url, doing="write"):
            for upload in self.fs.list_multipart_uploads(bucket):
                if upload["Key"].startswith(f"{prefix}/"):
                    what = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self.fs.call_s3("abort_multipart_upload", **what)

    async def _close(self) -> None:
        if getattr(self.fs, "_s3creator", None) is not None:  # s3fs has no call for it that waits until it is done
            await self.fs._s3creator.__aexit__(None, None, None)  # noqa: SLF001


class _Google(Store):
    def _library(self, scheme: str) -> type[AbstractFileSystem]:
        """The file system of gcsfs that speaks HTTP alone.

        What it gives by default asks by gRPC, of every request, what kind of bucket it is for: its connections are none
        that a process which forks can have, and where they are not allowed each request waits for a minute.
        """
        super()._library(scheme)
        from gcsfs.core import GCSFileSystem

        logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # else what it raises is printed, with a traceback
        return cast("type[AbstractFileSystem]", GCSFileSystem)

    def _options(self) -> dict[str, object]:
        from aiohttp import ClientTimeout

        return {"requests_timeout": ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENCE)}

    def _open(self, url: str, seen: Seen) -> Fetch:
        """Nothing is asked of the store when the object is opened; another version is refused (`ifGenerationMatch`)."""
        if not seen.version:
            return super()._open(url, seen)

        def fetch(start: int, stop: int) -> bytes:
            headers = {"Range": f"bytes={start}-{stop - 1}"}
            try:
                _, data = self.fs.call("GET", self.fs.url(key_of(url)), headers=headers, ifGenerationMatch=seen.version)
            except (FileExistsError, FileNotFoundError):  # what gcsfs makes of 412, and of 404
                raise changed(url) from None
            return bytes(data)

        return fetch

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        """In one request of these bytes alone.

        gcsfs sends name and bytes as parts that LF ends, where CRLF is to: an object that ends in CR may lose it, and
        Google's own testbench refuses it.
        """
        bucket, _, name = key.partition("/")
        query = {"uploadType": "media", "name": name, **({"ifGenerationMatch": "0"} if new else {})}
        url = self.fs.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
        self.fs.call("POST", url, bucket, data=data, headers={"Content-Type": "application/octet-stream"}, **query)

    def put_file(self, key: str, path: str) -> None:
        """In parts that are sent one after another, of which there may be any number, of a multiple of 256 KiB."""
        if os.stat(path).st_size < _WHOLE:
            self.put(key, Path(path).read_bytes())
        else:
            self.fs.put_file(path, key, chunksize=PARTS * PART)

    async def _close(self) -> None:
        if getattr(self.fs, "_session", None) is not None:  # gcsfs has no call for it that waits until it is done
            await self.fs._session.close()  # noqa: SLF001


class _Hub(Store):
    """Repositories are read at the commit that their revision was when it was first seen: that never changes."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self._pins: dict[str, str] = {}
        self._pinning = threading.Lock()

    def see_afresh(self) -> None:
        """Take the newest state of a repository for what is asked next."""
        with self._pinning:
            self._pins.clear()

    def _key(self, url: str) -> str:
        key = key_of(url)
        with self._pinning:
            root = next((own for own in self._pins if key == own or key.startswith(f"{own}/")), None)
            if root is None:
                root, self._pins[root] = self._pin(key)
            return self._pins[root] + key[len(root) :]

    def _pin(self, key: str) -> tuple[str, str]:
        """`owner/model@main`, and that with the commit which it is now."""
        from huggingface_hub import HfApi

        resolved = self.fs.resolve_path(key)
        inside = getattr(resolved, "path_in_repo", None)
        if inside is None:  # a bucket of theirs, which has no commits
            return key, key
        root = key[: -len(inside) - 1] if inside else key
        repository = HfApi(endpoint=self.fs.endpoint, token=self.fs.token).repo_info(
            resolved.repo_id, revision=resolved.revision, repo_type=resolved.repo_type
        )
        return root, f"{root.partition('@')[0]}@{repository.sha}"


async def _cancel_all() -> None:
    """End all requests that are under way."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def store_class(scheme: str) -> type[Store]:
    """What connects to the stores of a scheme."""
    return {"s3": _S3, "gs": _Google, "gcs": _Google, "hf": _Hub}.get(scheme, Store)
