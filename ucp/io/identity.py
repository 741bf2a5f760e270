"""Which file that is: its size and time, what a store tells its versions apart by, digests of its contents."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

from ucp.core.index import SourceFile
from ucp.errors import ChangedError, listed
from ucp.io.files import open_source, parts_of
from ucp.io.folder import files_below, is_url, path_of, see_afresh

_TAIL = 64 << 10
"""Bytes at each end of a file that its identity is taken from."""


def size_and_time(path: str) -> tuple[int, int]:
    """Bytes of a file (of all its parts, where it is split) and its last change in nanoseconds since 1970.

    Raises OSError when it is not there.
    """
    stats = [path_of(part).stat() for part in parts_of(path)]
    return sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)


def source_file(path: str, role: str) -> SourceFile:
    """A file that was read, as an index lists it. Raises OSError when it is not there."""
    nbytes, mtime_ns = size_and_time(path)
    return SourceFile(path=path, nbytes=nbytes, mtime_ns=mtime_ns, role=role, version=_version(path))


def is_remote(files: Iterable[SourceFile]) -> bool:
    """Whether some of the files that an index lists are objects of a store."""
    return any(is_url(file.path) for file in files)


def check_unchanged(files: Iterable[SourceFile]) -> None:
    """Raise ChangedError where objects of stores are others now than an index lists. Files of disks are not looked at.

    What was read between is of one state of each, if this is called afterwards.
    """
    remote = [file for file in files if is_url(file.path)]
    if not remote:
        return
    see_afresh(file.path for file in remote)
    changed = []
    for file in remote:
        with suppress(OSError):
            if (*size_and_time(file.path), _version(file.path)) == (file.nbytes, file.mtime_ns, file.version):
                continue
        changed.append(file.path)
    if changed:
        raise ChangedError(
            f"objects were replaced while they were read:\n{listed(changed)}\nWait until whoever writes there is done, "
            "then begin again"
        )


def _version(path: str) -> str:
    if not is_url(path):
        return ""
    from ucp.io.remote.file import RemoteFile

    return RemoteFile(path, parts_of(path)).version


def contents_of(path: Path) -> str:
    """Digest of all bytes of a file; of a folder, of the names, sizes and times in it. Raises OSError, SourceError."""
    if path.is_dir():
        stats = [(str(own), *size_and_time(str(own))) for own in sorted(files_below(path))]
        return xxhash.xxh3_128_hexdigest(repr(stats).encode())
    with open_source(str(path)) as file:
        return xxhash.xxh3_128_hexdigest(file.read(0, file.nbytes))


def identity_of(path: str) -> str:
    """Digest of the length and both ends of a file; of an object, what its store tells versions of it apart by.

    The end of a torch file is its zip directory, with the length and CRC-32 of every member: two such files with the
    same identity hold the same bytes.
    """
    if version := _version(path):
        return version
    with open_source(path) as file:
        head = file.read(0, min(_TAIL, file.nbytes))
        tail = file.read(max(0, file.nbytes - _TAIL), min(_TAIL, file.nbytes))
        return xxhash.xxh3_128_hexdigest(file.nbytes.to_bytes(8, "little") + head + tail)
