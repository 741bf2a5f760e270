"""What is particular about the store of a scheme: how its library is set up, and how one version of an object is read.

Retries with growing pauses are the libraries' own. Of S3, botocore makes a request that failed or was throttled three
times (`AWS_MAX_ATTEMPTS`, `AWS_RETRY_MODE`), s3fs that three times, and an answer that broke off three times: its own
five would be 25, and half an hour before a dead store is told of. gcsfs makes six, huggingface_hub five.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from ucp.io.remote.failures import changed

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["PART", "PARTS", "REQUESTS", "Fetch", "Seen", "Store", "store_of"]

REQUESTS = 16
"""Requests under way at once, in one process."""

PART = 8 << 20
"""Bytes of one part of an upload, unless the file would have too many of them."""
PARTS = 4
"""Parts of a file that are under way at once, or that go in one request."""
_MOST_PARTS = 10_000
"""Parts that S3 allows."""

_TRIES = 3
"""Times that botocore and s3fs each try."""

_CONNECT = 15.0
_SILENCE = 30.0
"""Seconds in which Google's store has to take a connection, and to say something; gcsfs waits for ever."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The stores of one scheme."""

    kind: Callable[[str], type[AbstractFileSystem]]
    """File system of fsspec for a scheme. Raises ImportError."""
    options: Callable[[], dict[str, object]] = dict
    """How one is made."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Attributes of one that are no options."""
    reads: Callable[[Any, str, Seen], Fetch] | None = None
    """What reads one version of an object alone (file system, key, object); None where versions are to be compared."""
    puts: Callable[..., None] | None = None
    """What writes a small object (file system, key, bytes, `new`: only where there is none); None: `pipe_file` does.

    Raises FileExistsError."""
    parts: Callable[[int], dict[str, int]] = lambda _: {}
    """How a file of so many bytes is cut to be uploaded, as `put_file` is told."""
    pinned: Callable[[Any, str], tuple[str, str]] | None = None
    """Root of a key as the user names it, and that of a state of it which stays; None where there is no such thing."""


def store_of(scheme: str) -> Store:
    """What is particular about the store of a scheme."""
    return _STORES.get(scheme, _ANY)


def _by_scheme(scheme: str) -> type[AbstractFileSystem]:
    from fsspec import get_filesystem_class

    return cast("type[AbstractFileSystem]", get_filesystem_class(scheme))


def _s3_options() -> dict[str, object]:
    """How botocore goes about it, unless the environment says otherwise."""
    options: dict[str, object] = {"max_pool_connections": REQUESTS}
    if not os.environ.keys() & {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"}:
        options["retries"] = {"mode": "standard", "total_max_attempts": _TRIES}
    return {"config_kwargs": options}


def _s3_reads(fs: Any, key: str, seen: Seen) -> Fetch:
    """Nothing is asked of the store when the object is opened; another version is refused (`If-Match`)."""
    etag = f'"{seen.version}"'
    file = fs.open(key, "rb", cache_type="none", size=seen.nbytes)
    file.details = {"name": key, "type": "file", "size": seen.nbytes, "ETag": etag}
    file.read_kw = {**file.read_kw, "IfMatch": etag}
    return cast("Fetch", file.cache.fetcher)


def _s3_parts(nbytes: int) -> dict[str, int]:
    """Parts of one size, of which there may not be too many.

    >>> _s3_parts(1 << 30), _s3_parts(1 << 40)
    ({'chunksize': 8388608, 'max_concurrency': 4}, {'chunksize': 109951163, 'max_concurrency': 4})
    """
    return {"chunksize": max(PART, -(-nbytes // _MOST_PARTS)), "max_concurrency": PARTS}


def _gcs_kind(scheme: str) -> type[AbstractFileSystem]:
    """The file system of gcsfs that speaks HTTP alone.

    What it gives by default asks by gRPC, of every request, what kind of bucket it is for: its connections are none
    that a process which forks can have, and where they are not allowed each request waits for a minute.
    """
    _by_scheme(scheme)
    from gcsfs.core import GCSFileSystem

    logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # else what it raises is printed, with a traceback
    return cast("type[AbstractFileSystem]", GCSFileSystem)


def _gcs_options() -> dict[str, object]:
    from aiohttp import ClientTimeout

    return {"requests_timeout": ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENCE)}


def _gcs_reads(fs: Any, key: str, seen: Seen) -> Fetch:
    """Nothing is asked of the store when the object is opened; another version is refused (`ifGenerationMatch`)."""

    def fetch(start: int, stop: int) -> bytes:
        own = {"Range": f"bytes={start}-{stop - 1}"}
        try:
            _, data = fs.call("GET", fs.url(key), headers=own, ifGenerationMatch=seen.version)
        except (FileExistsError, FileNotFoundError):  # what gcsfs makes of 412, and of 404
            raise changed(f"{fs.protocol[0]}://{key}") from None
        return bytes(data)

    return fetch


def _gcs_puts(fs: Any, key: str, data: bytes, *, new: bool) -> None:
    """In one request of these bytes alone.

    gcsfs sends name and bytes as parts that LF ends, where CRLF is to: an object that ends in CR may lose it, and
    Google's own testbench refuses it.
    """
    bucket, _, name = key.partition("/")
    asked = {"uploadType": "media", "name": name, **({"ifGenerationMatch": "0"} if new else {})}
    url = fs.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
    fs.call("POST", url, bucket, data=data, headers={"Content-Type": "application/octet-stream"}, **asked)


def _gcs_parts(_: int) -> dict[str, int]:
    """Parts that are sent one after another, of which there may be any number, of a multiple of 256 KiB."""
    return {"chunksize": PARTS * PART}


def _hub_pinned(fs: Any, key: str) -> tuple[str, str]:
    """`owner/model@main` to that with the commit which it is now: what is read of a commit never changes."""
    from huggingface_hub import HfApi

    resolved = fs.resolve_path(key)
    inside = getattr(resolved, "path_in_repo", None)
    if inside is None:  # a bucket of theirs, which has no commits
        return key, key
    root = key[: -len(inside) - 1] if inside else key
    found = HfApi(endpoint=fs.endpoint, token=fs.token).repo_info(
        resolved.repo_id, revision=resolved.revision, repo_type=resolved.repo_type
    )
    return root, f"{root.partition('@')[0]}@{found.sha}"


_ANY = Store(kind=_by_scheme)
_GCS = Store(kind=_gcs_kind, options=_gcs_options, reads=_gcs_reads, puts=_gcs_puts, parts=_gcs_parts)
_STORES = {
    "s3": Store(kind=_by_scheme, options=_s3_options, settings={"retries": _TRIES}, reads=_s3_reads, parts=_s3_parts),
    "gs": _GCS,
    "gcs": _GCS,
    "hf": Store(kind=_by_scheme, pinned=_hub_pinned),
}
