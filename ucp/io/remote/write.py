"""Objects written to a store, whole, by its library: uploads in parts, retries and checks are its own.

There is no rename there, and nothing is written in place: an object is there when all of it is, or not at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ucp.errors import DestinationError, MissingFileError, UsageError
from ucp.io.remote.failures import told
from ucp.io.remote.link import link_of
from ucp.io.remote.listing import time_of
from ucp.io.remote.stores import PART, PARTS, version_of
from ucp.io.remote.url import key_of, scheme_of

UPLOADS = 3
"""Files that are uploaded side by side, beside small ones."""

SMALL = 1 << 20
"""Bytes up to which a file is small."""
SMALL_UPLOADS = 12
"""Small files that are uploaded side by side."""

MEMORY = UPLOADS * PARTS * PART + SMALL_UPLOADS * SMALL
"""Bytes of memory that uploads take; more for files above 80 GB in S3, whose parts are larger."""

_WRITTEN = ("s3", "gs", "gcs", "memory")
"""Schemes of stores that are written to."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store says of an object."""

    nbytes: int
    """Bytes."""
    version: str
    """ETag or generation; its time in nanoseconds, where the store has no such thing."""


def check_writable(url: str) -> None:
    """Raise UsageError for a store that is only read."""
    if not is_written(url):
        known = ", ".join(f"{own}://" for own in _WRITTEN)
        raise UsageError(f"expected a destination in a folder, or of {known}; got {url}, which is only read")


def is_written(url: str) -> bool:
    """Whether a store is written to, not read alone."""
    return scheme_of(url) in _WRITTEN


def put_file(url: str, path: str) -> Stored:
    """Upload a file; what the store says of it. Raises UcpError, and OSError where the file cannot be read."""
    size = os.stat(path).st_size
    with told(url, doing="write"):
        link_of(url).put_file(key_of(url), path)
    found = stored(url)
    if found is None or found.nbytes != size:
        raise DestinationError(
            f"expected {size:,} bytes at {url} after they were uploaded; the store has "
            f"{'nothing' if found is None else f'{found.nbytes:,}'} there. Does something else write or clean up there?"
        )
    return found


def write(url: str, data: bytes) -> None:
    """Write a small object. Raises UcpError."""
    with told(url, doing="write"):
        link_of(url).put(key_of(url), data)


def create(url: str, data: bytes) -> bool:
    """Write a small object unless there is one; whether it was written. Raises UcpError.

    A store that knows no condition on a write overwrites: who looked before may be too late.
    """
    with told(url, doing="write"):
        try:
            link_of(url).put(key_of(url), data, new=True)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno == errno.ENOSYS or "NotImplemented" in str(error):
                write(url, data)
                return True
            if error.errno in (errno.EINVAL, errno.EBUSY) and stored(url) is not None:  # 412 and 409 of S3
                return False
            raise
    return True


def stored(url: str) -> Stored | None:
    """What is said of one object now; None where there is none. Raises UcpError."""
    found = link_of(url).info(url)
    if found is None or found["type"] == "directory":
        return None
    return _stored(found)


def stored_below(url: str) -> dict[str, Stored]:
    """All objects below a URL now, by their path from there; none where there is no bucket. Raises UcpError."""
    try:
        found = link_of(url).find(url)
    except MissingFileError:
        return {}
    return {name: _stored(details) for name, details in found.items() if details["type"] != "directory"}


def _stored(details: Mapping[str, Any]) -> Stored:
    return Stored(int(details["size"] or 0), version_of(details) or str(time_of(details)))


def read(url: str) -> bytes:
    """A small object as it is now; empty where there is none. Raises UcpError."""
    with told(url):
        try:
            return bytes(link_of(url).fs.cat_file(key_of(url)))
        except FileNotFoundError:
            return b""


def remove(urls: Iterable[str]) -> None:
    """Remove objects, as far as they are there, in no order. Raises UcpError."""

    def remove_one(url: str) -> None:
        with told(url, doing="write"), suppress(FileNotFoundError):
            link_of(url).fs.rm_file(key_of(url))

    for removal in [link_of(url).submit(remove_one, url) for url in urls]:
        removal.result()
