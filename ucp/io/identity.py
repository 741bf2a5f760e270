"""Which program this is, and which file that is."""

from __future__ import annotations

import os
from importlib import metadata

import xxhash

from ucp.core.index import SourceFile
from ucp.io.files import open_source, split_parts

__all__ = ["identity_of", "producer", "size_and_time", "source_file"]

_TAIL = 64 << 10
"""Bytes at each end of a file that its identity is taken from."""


def producer() -> str:
    """This program and its version, e.g. "ucp 0.1.0"."""
    try:
        return f"ucp {metadata.version('universal-checkpoint')}"
    except metadata.PackageNotFoundError:
        return "ucp (not installed)"


def size_and_time(path: str) -> tuple[int, int]:
    """Bytes of a file (of all its parts, where it is split) and its last change in nanoseconds since 1970.

    Raises OSError when it is not there.
    """
    stats = [os.stat(part) for part in (split_parts(path) if not os.path.lexists(path) else ()) or (path,)]
    return sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)


def source_file(path: str, role: str) -> SourceFile:
    """A file that was read, as an index lists it. Raises OSError when it is not there."""
    nbytes, mtime_ns = size_and_time(path)
    return SourceFile(path=path, nbytes=nbytes, mtime_ns=mtime_ns, role=role)


def identity_of(path: str) -> str:
    """Digest of the length and both ends of a file.

    The end of a torch file is its zip directory, with the length and CRC-32 of every member: two such files with the
    same identity hold the same bytes.
    """
    with open_source(path) as file:
        head = file.read(0, min(_TAIL, file.nbytes))
        tail = file.read(max(0, file.nbytes - _TAIL), min(_TAIL, file.nbytes))
        return xxhash.xxh3_128_hexdigest(file.nbytes.to_bytes(8, "little") + head + tail)
