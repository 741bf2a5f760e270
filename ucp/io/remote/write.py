"""Writing objects to a store. An object appears complete or not at all: there is no rename, and no write in place.

Multipart uploads, retries and checks are those of the store's library.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ucp.errors import DestinationError, MissingFileError, UsageError
from ucp.io.remote.connections import connect
from ucp.io.remote.failures import translate_errors
from ucp.io.remote.listing import time_of
from ucp.io.remote.stores import PART, PARTS, version_of
from ucp.io.remote.url import key_of, scheme_of

UPLOADS = 3
"""Concurrent uploads of files that are not small."""

SMALL = 1 << 20
"""Bytes up to which a file is small."""
SMALL_UPLOADS = 12
"""Concurrent uploads of small files."""

MEMORY = UPLOADS * PARTS * PART + SMALL_UPLOADS * SMALL
"""Bytes of memory that uploads take; more for files above 80 GB in S3, whose parts are larger."""

_WRITABLE = ("s3", "gs", "gcs", "memory")
"""Schemes of stores that can be written to."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Size and version of an object."""

    nbytes: int
    """Bytes."""
    version: str
    """ETag or generation; in a store without them the modification time in nanoseconds."""


def check_writable(url: str) -> None:
    """Raise UsageError for a store that cannot be written to."""
    if not is_writable(url):
        schemes = ", ".join(f"{scheme}://" for scheme in _WRITABLE)
        raise UsageError(f"expected a destination in a folder, or a URL of {schemes}; got {url}, which is read-only")


def is_writable(url: str) -> bool:
    """Whether the store of a URL can be written to."""
    return scheme_of(url) in _WRITABLE


def put_file(url: str, path: str) -> StoredObject:
    """Upload a file. Raises UcpError, and OSError if the file cannot be read."""
    size = os.stat(path).st_size
    with translate_errors(url, doing="write"):
        connect(url).put_file(key_of(url), path)
    stored = find_object(url)
    if stored is None or stored.nbytes != size:
        raise DestinationError(
            f"expected {size:,} bytes at {url} after they were uploaded; the store has "
            f"{'nothing' if stored is None else f'{stored.nbytes:,}'}. Does something else write or clean up there?"
        )
    return stored


def write(url: str, data: bytes) -> None:
    """Write a small object. Raises UcpError."""
    with translate_errors(url, doing="write"):
        connect(url).put(key_of(url), data)


def write_new(url: str, data: bytes) -> bool:
    """Write a small object unless it exists. Returns whether it was written. Raises UcpError.

    A store without conditional writes overwrites it: two processes may then both believe that they were first.
    """
    with translate_errors(url, doing="write"):
        try:
            connect(url).put(key_of(url), data, new=True)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno == errno.ENOSYS or "NotImplemented" in str(error):
                write(url, data)
                return True
            if error.errno in (errno.EINVAL, errno.EBUSY) and find_object(url) is not None:  # 412 and 409 of S3
                return False
            raise
    return True


def find_object(url: str) -> StoredObject | None:
    """The object at a URL now; None if there is none. Raises UcpError."""
    details = connect(url).info(url)
    if details is None or details["type"] == "directory":
        return None
    return _to_stored(details)


def find_objects(url: str) -> dict[str, StoredObject]:
    """All objects below a URL now, by relative path; none if the bucket does not exist. Raises UcpError."""
    try:
        listing = connect(url).find(url)
    except MissingFileError:
        return {}
    return {name: _to_stored(details) for name, details in listing.items() if details["type"] != "directory"}


def _to_stored(details: Mapping[str, Any]) -> StoredObject:
    return StoredObject(int(details["size"] or 0), version_of(details) or str(time_of(details)))


def read(url: str) -> bytes:
    """Bytes of a small object; empty if it does not exist. Raises UcpError."""
    with translate_errors(url):
        try:
            return bytes(connect(url).fs.cat_file(key_of(url)))
        except FileNotFoundError:
            return b""


def remove(urls: Iterable[str]) -> None:
    """Remove the objects that exist, in no order. Raises UcpError."""

    def remove_one(url: str) -> None:
        with translate_errors(url, doing="write"), suppress(FileNotFoundError):
            connect(url).fs.rm_file(key_of(url))

    for removal in [connect(url).submit(remove_one, url) for url in urls]:
        removal.result()
