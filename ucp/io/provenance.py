"""Which files were read, and the file in a destination that says how it was made.

A finished destination holds `ucp-conversion.json` (its *mark*): the conversion, and every file with its size. With it,
a finished conversion can be checked for lost or changed files without reading a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash
from msgspec import Struct
from zlib_ng import zlib_ng

from ucp.core.index import SourceFile
from ucp.errors import ChangedError, DestinationError, SourceError, format_count, format_list
from ucp.io.files import open_source, parts_of
from ucp.io.folder import MARK, files_below, is_url, path_of, refresh
from ucp.io.json_text import Natural, NotJson, decode, has_wrong_digest, with_digest
from ucp.io.remote.url import key_of

_TAIL = 64 << 10
"""Bytes at each end of a file that `identity_of` hashes."""

_LEVELS_ABOVE = 2
"""Folders above a checkpoint that may hold its mark: a tag or an iteration is a folder of the destination."""

_CHUNK = 8 << 20
"""Bytes that are read and checksummed in one go."""


def size_and_time(path: str) -> tuple[int, int]:
    """Bytes of a file (all its parts, if it is split) and its modification time in ns since 1970. Raises OSError."""
    stats = [path_of(part).stat() for part in parts_of(path)]
    return sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)


def source_file(path: str, role: str) -> SourceFile:
    """A file that was read, as an index lists it. Raises OSError when it is missing."""
    nbytes, mtime_ns = size_and_time(path)
    return SourceFile(path=path, nbytes=nbytes, mtime_ns=mtime_ns, role=role, version=_object_version(path))


def is_remote(files: Iterable[SourceFile]) -> bool:
    """Whether some of the files are objects in a bucket."""
    return any(is_url(file.path) for file in files)


def check_unchanged(files: Iterable[SourceFile]) -> None:
    """Raise ChangedError for objects in buckets that were replaced since they were listed. Local files are skipped.

    Called after reading, it proves that all reads saw the same version of each object.
    """
    remote = [file for file in files if is_url(file.path)]
    refresh(file.path for file in remote)
    changed = []
    for file in remote:
        with suppress(OSError):
            if (*size_and_time(file.path), _object_version(file.path)) == (file.nbytes, file.mtime_ns, file.version):
                continue
        changed.append(file.path)
    if changed:
        raise ChangedError(
            f"objects were replaced while they were read:\n{format_list(changed)}\nWait until whoever writes there is "
            "done, then begin again"
        )


def check_local(files: Iterable[SourceFile]) -> None:
    """Raise ChangedError for files on disks that were changed since they were listed."""
    for file in files:
        if not is_url(file.path) and size_and_time(file.path) != (file.nbytes, file.mtime_ns):
            raise ChangedError(f"expected {file.path} as it was when it was opened; it was changed since. Begin again")


def _object_version(path: str) -> str:
    if not is_url(path):
        return ""
    from ucp.io.remote.file import RemoteFile

    return RemoteFile(path, parts_of(path)).version


def contents_of(path: Path) -> str:
    """Digest of a file's bytes, or of the names, sizes and times in a folder. Raises OSError, SourceError."""
    if path.is_dir():
        stats = [(str(file), *size_and_time(str(file))) for file in sorted(files_below(path))]
        return xxhash.xxh3_128_hexdigest(repr(stats).encode())
    with open_source(str(path)) as file:
        return xxhash.xxh3_128_hexdigest(file.read(0, file.nbytes))


def identity_of(path: str) -> str:
    """Digest of a file's length and both its ends; for an object, its version in the bucket.

    A torch file ends with its zip directory, which has the length and CRC-32 of every member: two torch files of the
    same identity hold the same bytes.
    """
    if version := _object_version(path):
        return version
    with open_source(path) as file:
        head = file.read(0, min(_TAIL, file.nbytes))
        tail = file.read(max(0, file.nbytes - _TAIL), min(_TAIL, file.nbytes))
        return xxhash.xxh3_128_hexdigest(file.nbytes.to_bytes(8, "little") + head + tail)


_MOST_MARK = 1 << 28
"""Bytes of a mark, at most: it lists millions of files."""


class Mark(Struct, frozen=True, kw_only=True):
    """The fields of the mark that are compared; the others are for people."""

    fingerprint: str = ""
    """Equal for conversions that write the same bytes."""
    target: str = ""
    """Target that it was written for."""
    made: dict[str, str] = {}
    """What was made from what, and how."""
    files: dict[str, Natural | None] = {}
    """File to bytes; None for a file that a framework may overwrite."""
    crc32: dict[str, Natural] = {}
    """CRC-32 of the metadata files."""


def dump_mark(origin: Mapping[str, Any], sizes: Mapping[str, int | None], sums: Mapping[str, int]) -> bytes:
    """Text of the mark. `origin`: how the destination was made; `sizes`, `sums`: fields `files`, `crc32`."""
    document = {**origin, "files": {MARK: None, **sizes}, "crc32": dict(sums)}
    return with_digest(json.dumps(document, indent=1).encode())


def read_mark(dst: Path) -> Mark:
    """The mark of a destination; an empty one if there is none. Raises DestinationError when it is damaged."""
    if not (dst / MARK).is_file():
        return Mark()
    text = (dst / MARK).read_bytes() if (dst / MARK).stat().st_size <= _MOST_MARK else b""
    with suppress(NotJson):
        mark = Mark() if has_wrong_digest(text) else decode(text, Mark)
        if mark.fingerprint and mark.files:  # every mark has both
            return mark
    raise DestinationError(
        f"{dst / MARK} is damaged: it should say which conversion wrote {dst}, and which files. Copy the file again; "
        f"or remove {dst} yourself, and convert again"
    )


def find_destination(path: Path) -> Path | None:
    """The destination that the checkpoint at `path` is part of; None if no mark is found."""
    above = (folder for folder in path.parents[:_LEVELS_ABOVE] if not is_url(str(folder)) or "/" in key_of(str(folder)))
    return next((folder for folder in (path, *above) if (folder / MARK).is_file()), None)


def is_complete(dst: Path, fingerprint: str, *, overwrite: bool = False) -> bool:
    """Whether `dst` holds the finished conversion with this fingerprint.

    Raises DestinationError when its files were changed since; with `overwrite` it counts as not complete instead.
    """
    mark = read_mark(dst)
    if mark.fingerprint != fingerprint:
        return False
    damage = find_damage(dst, mark)
    if damage and not overwrite:
        files, verb = format_count(len(damage), "file"), "is" if len(damage) == 1 else "are"
        raise DestinationError(
            f"this conversion was finished, but {files} in {dst} {verb} not as written:\n{format_list(damage)}\nCopy "
            "them again, or write all of them again with --overwrite in place of --resume"
        )
    return not damage


def find_damage(dst: Path, mark: Mark, *, measured: Collection[str] | None = None) -> list[str]:
    """A line for each file of `mark` that is missing, or whose length or CRC-32 differs.

    `measured`: check only these files and those with a CRC-32. A file that a framework may overwrite must only exist.
    """
    damage, sums = [], mark.crc32
    for path, nbytes in mark.files.items():
        if measured is not None and path not in measured and path not in sums:
            continue
        try:
            length = (dst / path).stat().st_size
            if nbytes is not None and length != nbytes:
                damage.append(f"{path}: expected {nbytes:,} bytes; got {length:,}")
            elif path in sums and _crc32(dst / path) != sums[path]:
                damage.append(f"{path}: CRC-32 differs, its bytes were changed")
        except (FileNotFoundError, NotADirectoryError):
            damage.append(f"{path}: missing")
        except (OSError, SourceError) as error:
            damage.append(f"{path}: cannot be read ({error})")
    return damage


def _crc32(path: Path) -> int:
    crc = 0
    with open_source(str(path)) as file:
        for start in range(0, file.nbytes, _CHUNK):
            crc = zlib_ng.crc32(file.read(start, min(_CHUNK, file.nbytes - start)), crc)
    return crc
