"""A connection to the stores of one scheme, through its fsspec library, and what differs from store to store.

Each connection has its own event loop and threads, so that it can be closed before processes are forked.

The libraries retry with growing pauses. For S3, botocore tries a request three times (`AWS_MAX_ATTEMPTS`,
`AWS_RETRY_MODE`), and s3fs repeats that three times: with its default of five each, a dead store would be reported
after half an hour. gcsfs tries six times, huggingface_hub five.
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
from ucp.io.remote.failures import changed_error, missing_library_error, translate_errors
from ucp.io.remote.url import bucket_of, key_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_REQUESTS = 16
"""Concurrent requests of one process."""

PART = 8 << 20
"""Bytes of one part of an upload; more if the file would have too many parts."""
PARTS = 4
"""Parts of a file that are uploaded concurrently, or in one request."""
_MOST_PARTS = 10_000
"""Parts that S3 allows."""
_SINGLE_REQUEST = 5 << 20
"""Bytes below which a file is sent to Google Cloud Storage in one request, as in gcsfs."""

_TRIES = 3
"""Tries of botocore, and of s3fs."""

_CONNECT = 15.0
_SILENCE = 30.0
"""Seconds to wait for a connection to Google Cloud Storage, and for an answer; gcsfs waits forever."""

THREADS = "ucp-remote"
"""Prefix of the names of our threads."""

Fetch = Callable[[int, int], bytes]
"""Reads bytes from a first to one past the last."""


class ObjectVersion(Protocol):
    """Size and version of an object, as listed."""

    @property
    def nbytes(self) -> int:
        """Bytes."""

    @property
    def version(self) -> str:
        """ETag or generation; empty if the store has none."""


def version_of(details: Mapping[str, Any]) -> str:
    """ETag, generation or the like of an object, which changes with its bytes; empty if there is none."""
    tag = next((details[key] for key in ("ETag", "generation", "etag", "blob_id") if details.get(key)), "")
    return str(tag).strip('"')


class Store:
    """A connection to the stores of one scheme, through any library of fsspec."""

    def __init__(self, scheme: str) -> None:
        """Raises MissingLibraryError."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        try:
            kind = self._library(scheme)
            options = {"skip_instance_cache": True, "use_listings_cache": False, **self._options()}
        except ImportError:
            raise missing_library_error(scheme) from None
        if getattr(kind, "async_impl", False):
            self._loop = options["loop"] = asyncio.new_event_loop()
            self._loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix=THREADS))
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"{THREADS}-loop", daemon=True)
            self._thread.start()
        self.fs: Any = kind(**options)
        self._files: dict[tuple[str, ObjectVersion], Fetch] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def info(self, url: str) -> Mapping[str, Any] | None:
        """Details of an object or folder; None if there is none. Raises SourceError."""
        with translate_errors(url):
            try:
                return cast("Mapping[str, Any]", self.fs.info(self._key(url)))
            except (FileNotFoundError, NotImplementedError):  # the latter above the repositories of the Hub
                return None

    def list(self, url: str) -> dict[str, Mapping[str, Any]] | None:
        """Names in a folder with their details; None if there is no folder. Raises SourceError."""
        with translate_errors(url):
            try:
                key = self._key(url)
                details = self.fs.ls(key, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return None
        paths = {str(entry["name"]).strip("/"): entry for entry in details}
        inside = {path.rpartition("/")[2]: entry for path, entry in paths.items() if path != key}
        return inside if inside or not details else None

    def find(self, url: str) -> dict[str, Mapping[str, Any]]:
        """Relative paths of all objects below a folder, with their details. Raises SourceError."""
        with translate_errors(url):
            key = self._key(url)
            details = self.fs.find(key, detail=True).values()
        return {str(entry["name"]).strip("/")[len(key) + 1 :]: entry for entry in details}

    def fetch(self, url: str, listed: ObjectVersion, start: int, stop: int) -> bytes:
        """Bytes of an object, if it still is the listed version. Raises SourceError, ChangedError.

        Requests to S3 and Google Cloud Storage name the version; for other stores it is compared before the first read.
        At the end all versions are compared again (`ucp.io.provenance.check_unchanged`).
        """
        with translate_errors(url):
            fetch = self._files.get((url, listed)) or self._files.setdefault((url, listed), self._open(url, listed))
            data = fetch(start, stop) or b""  # None if the request was cancelled
        if len(data) != stop - start:
            raise ConnectionLostError(f"expected {stop - start} bytes of {url}; the store gave {len(data)}. Try again")
        return data

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        """Write a small object; `new`: only if there is none. Raises FileExistsError, and what the library raises."""
        self.fs.pipe_file(key, data, **({"mode": "create"} if new else {}))

    def put_file(self, key: str, path: str) -> None:
        """Upload a file."""
        self.fs.put_file(path, key)

    def abort_uploads(self, url: str) -> None:
        """Abort multipart uploads below a URL that a killed process left."""

    def refresh(self) -> None:
        """Forget what is cached."""

    def submit(self, call: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Run a call in one of our threads."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix=THREADS)
        return self._pool.submit(call, *arguments)

    def close(self) -> None:
        """Close connections and threads; running requests are aborted."""
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
        """The file system class of fsspec. Raises ImportError."""
        from fsspec import get_filesystem_class

        return cast("type[AbstractFileSystem]", get_filesystem_class(scheme))

    def _options(self) -> dict[str, object]:
        """Arguments for the file system class."""
        return {}

    def _key(self, url: str) -> str:
        """Key of a URL, as the library takes it."""
        return key_of(url)

    def _open(self, url: str, listed: ObjectVersion) -> Fetch:
        """A reader of the listed version of an object. Raises ChangedError."""
        key = self._key(url)
        file = self.fs.open(key, "rb", cache_type="none")
        now = file.details if hasattr(file, "cache") else self.fs.info(key)
        if (now["size"], version_of(now)) != (listed.nbytes, listed.version):
            raise changed_error(url)
        if hasattr(file, "cache"):
            return cast("Fetch", file.cache.fetcher)
        return lambda start, stop: cast("bytes", self.fs.cat_file(key, start=start, end=stop))

    async def _close(self) -> None:
        """Close the connections of the file system."""


class _S3(Store):
    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self.fs.retries = _TRIES

    def _options(self) -> dict[str, object]:
        """Retries of botocore, unless the environment sets them."""
        options: dict[str, object] = {"max_pool_connections": _REQUESTS}
        if not os.environ.keys() & {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"}:
            options["retries"] = {"mode": "standard", "total_max_attempts": _TRIES}
        return {"config_kwargs": options}

    def _open(self, url: str, listed: ObjectVersion) -> Fetch:
        """Opening makes no request; reading another version fails (`If-Match`)."""
        if not listed.version:
            return super()._open(url, listed)
        key, etag = key_of(url), f'"{listed.version}"'
        file = self.fs.open(key, "rb", cache_type="none", size=listed.nbytes)
        file.details = {"name": key, "type": "file", "size": listed.nbytes, "ETag": etag}
        file.read_kw = {**file.read_kw, "IfMatch": etag}
        return cast("Fetch", file.cache.fetcher)

    def put_file(self, key: str, path: str) -> None:
        """Parts have one size, and S3 limits their number."""
        chunk = max(PART, -(-os.stat(path).st_size // _MOST_PARTS))
        self.fs.put_file(path, key, chunksize=chunk, max_concurrency=PARTS)

    def abort_uploads(self, url: str) -> None:
        """They are invisible, but stored. Without permission to list them, they stay until the bucket's rules act."""
        bucket, prefix = bucket_of(url), key_of(url).partition("/")[2]
        with suppress(AccessError), translate_errors(url, doing="write"):
            for upload in self.fs.list_multipart_uploads(bucket):
                if upload["Key"].startswith(f"{prefix}/"):
                    what = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self.fs.call_s3("abort_multipart_upload", **what)

    async def _close(self) -> None:
        if getattr(self.fs, "_s3creator", None) is not None:  # s3fs has no public call that waits
            await self.fs._s3creator.__aexit__(None, None, None)  # noqa: SLF001


class _Google(Store):
    def _library(self, scheme: str) -> type[AbstractFileSystem]:
        """The file system of gcsfs that uses HTTP alone.

        The default one asks by gRPC for the type of each bucket: its connections do not survive a fork, and where they
        are blocked every request waits for a minute.
        """
        super()._library(scheme)
        from gcsfs.core import GCSFileSystem

        logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # else it prints tracebacks
        return cast("type[AbstractFileSystem]", GCSFileSystem)

    def _options(self) -> dict[str, object]:
        from aiohttp import ClientTimeout

        return {"requests_timeout": ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENCE)}

    def _open(self, url: str, listed: ObjectVersion) -> Fetch:
        """Opening makes no request; reading another version fails (`ifGenerationMatch`)."""
        if not listed.version:
            return super()._open(url, listed)

        def fetch(start: int, stop: int) -> bytes:
            headers = {"Range": f"bytes={start}-{stop - 1}"}
            try:
                _, data = self.fs.call(
                    "GET", self.fs.url(key_of(url)), headers=headers, ifGenerationMatch=listed.version
                )
            except (FileExistsError, FileNotFoundError):  # status 412 and 404
                raise changed_error(url) from None
            return bytes(data)

        return fetch

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        """Upload as plain media.

        gcsfs would send a multipart body with LF in place of CRLF: an object that ends in CR may lose it, and Google's
        own testbench refuses the request.
        """
        bucket, _, name = key.partition("/")
        query = {"uploadType": "media", "name": name, **({"ifGenerationMatch": "0"} if new else {})}
        url = self.fs.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
        self.fs.call("POST", url, bucket, data=data, headers={"Content-Type": "application/octet-stream"}, **query)

    def put_file(self, key: str, path: str) -> None:
        """Parts are sent one after another; each is a multiple of 256 KiB."""
        if os.stat(path).st_size < _SINGLE_REQUEST:
            self.put(key, Path(path).read_bytes())
        else:
            self.fs.put_file(path, key, chunksize=PARTS * PART)

    async def _close(self) -> None:
        if getattr(self.fs, "_session", None) is not None:  # gcsfs has no public call that waits
            await self.fs._session.close()  # noqa: SLF001


class _Hub(Store):
    """Repositories of the Hugging Face Hub, read at the commit that a revision had when it was first used."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self._pins: dict[str, str] = {}
        self._pinning = threading.Lock()

    def refresh(self) -> None:
        with self._pinning:
            self._pins.clear()

    def _key(self, url: str) -> str:
        key = key_of(url)
        with self._pinning:
            root = next((pinned for pinned in self._pins if key == pinned or key.startswith(f"{pinned}/")), None)
            if root is None:
                root, self._pins[root] = self._pin(key)
            return self._pins[root] + key[len(root) :]

    def _pin(self, key: str) -> tuple[str, str]:
        """The root of a key, and the root at its commit: `owner/model@main` and `owner/model@<commit>`."""
        from huggingface_hub import HfApi

        resolved = self.fs.resolve_path(key)
        inside = getattr(resolved, "path_in_repo", None)
        if inside is None:  # a bucket of the Hub, which has no commits
            return key, key
        root = key[: -len(inside) - 1] if inside else key
        repository = HfApi(endpoint=self.fs.endpoint, token=self.fs.token).repo_info(
            resolved.repo_id, revision=resolved.revision, repo_type=resolved.repo_type
        )
        return root, f"{root.partition('@')[0]}@{repository.sha}"


async def _cancel_all() -> None:
    """Cancel all running requests."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def store_class(scheme: str) -> type[Store]:
    """The class of connections to the stores of a scheme."""
    return {"s3": _S3, "gs": _Google, "gcs": _Google, "hf": _Hub}.get(scheme, Store)
