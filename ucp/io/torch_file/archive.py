"""Reads a file of torch.save: its unpickled value, with every tensor a `TensorRef` into the file.

The first bytes tell the container: the zip archive of torch 1.6 and later, the older sequence of pickles and raw
storages (`legacy`), or the tar file of torch 0.1, which is refused. The bytes of storages are never read.

>>> read_archive("nothing-here.pt")
Traceback (most recent call last):
ucp.errors.MissingFileError: expected a file at nothing-here.pt; nothing is there. Check the path, or copy it
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from zlib_ng import zlib_ng

from ucp.core.tensor import Record
from ucp.errors import CorruptError, MalformedError, SourceError, UnsupportedError
from ucp.io.files import SourceFile, open_source
from ucp.io.folder import path_of
from ucp.io.pickle.unpickle import parse_pickle
from ucp.io.torch_file.legacy import read_legacy
from ucp.io.torch_file.storage import StorageId, StorageRef
from ucp.io.torch_file.zipdir import Window, ZipMember, data_offset, data_offsets, read_directory

_SIGNATURES = {
    b"version https://git-lfs": "a Git LFS pointer; run `git lfs pull`",
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"\x1f\x8b": "a gzip file; gunzip it",
    b"\x28\xb5\x2f\xfd": "a zstandard file; unzstd it",
    b"\x93NUMPY": "a numpy file",
    b"PK\x05\x06": "an empty zip archive",
    b"": "other bytes",
}
"""What a file that is not of torch.save may be, by its first bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One file of torch.save."""

    path: str
    """File."""
    kind: Literal["zip", "legacy"]
    """Container."""
    root: object
    """What was saved: plain values, names, stubs and tensor references."""
    records: tuple[Record, ...] = ()
    """Checksums of the storages, if the writer recorded them (zip)."""
    saved_as: str = ""
    """Stem of the name that the file was saved under: torch names the folder in the archive after it (zip)."""


def read_archive(path: str, *, start: int = 0, nbytes: int | None = None) -> Archive:
    """Read the file at `path`, or the archive in its bytes `start` to `start + nbytes`.

    Parameters
    ----------
    path
        A file of torch.save, whole or split in parts (`ucp.io.files`).
    start, nbytes
        Byte range of an archive embedded in a larger file; without `nbytes`, to the end of the file.

    Raises
    ------
    MissingFileError
        Nothing is at `path`.
    MalformedError
        Not a file of torch.save, truncated, inconsistent, or renamed to another rank's file.
    UnsupportedError
        Big-endian, compressed, or the tar format of torch 0.1.
    CorruptError
        The pickle does not match its checksum.
    """
    with open_source(path) as file:
        archive = read_embedded(file, start=start, nbytes=file.nbytes - start if nbytes is None else nbytes)
    if not start and nbytes is None:
        _check_name(archive)
    return archive


def _check_name(archive: Archive) -> None:
    """Refuse a file that has the name of another rank or layer: two were exchanged, or one was renamed.

    A copy that overwrote another file passes here, as does a file with a name of another kind.
    """
    folder, name = os.path.split(archive.path)
    stem, suffix = os.path.splitext(name)
    if archive.saved_as in ("", stem):
        return
    other, why = os.path.join(folder, archive.saved_as + suffix), ""
    if path_of(other).is_file():
        with suppress(SourceError), open_source(other) as file:
            window = Window(file, 0, file.nbytes)
            named = _prefix(window, read_directory(window))
            if named != archive.saved_as:
                why = f"the file of that name as {named}{suffix}: files were exchanged"
    elif re.sub("[0-9]+", "#", archive.saved_as) == re.sub("[0-9]+", "#", stem):  # only ranks or layers differ
        why = "there is none of that name: it was renamed"
    if why:
        raise MalformedError(
            f"expected the file that was saved as {name}; {archive.path} was saved as {archive.saved_as}{suffix}, and "
            f"{why}. Copy the files again, or give them the names that they were saved under"
        )


def read_embedded(file: SourceFile, *, start: int, nbytes: int) -> Archive:
    """Read the archive in the bytes `start` to `start + nbytes` of an open file.

    Raises as `read_archive` does.
    """
    window = Window(file, start, nbytes)
    head = window.read(0, min(512, window.nbytes))
    if head.startswith(b"PK\x03\x04"):
        return _read_zip(window)
    if head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5:
        return Archive(path=file.path, kind="legacy", root=read_legacy(window))
    if head[257:262] == b"ustar" or head.startswith((b"./", b"storages\0", b"sys_info\0", b"pickle\0")):
        raise UnsupportedError(
            f"{window.where}: the tar format of torch 0.1 (2016). Load it with torch and save it again with torch.save"
        )
    kind = next(what for magic, what in _SIGNATURES.items() if head.startswith(magic))
    raise MalformedError(
        f"{window.where}: expected a file of torch.save, which begins with b'PK\\x03\\x04' or a pickle; got {kind} "
        f"({head[:16]!r}, {window.nbytes} bytes). Check that the right file was copied, and completely"
    )


def _read_zip(window: Window) -> Archive:
    members = read_directory(window)
    prefix = _prefix(window, members)
    pickled = members[f"{prefix}/data.pkl"]
    summed = any(member.crc32 for member in members.values())
    data = window.read(data_offset(window, pickled), pickled.nbytes)
    if summed and zlib_ng.crc32(data) != pickled.crc32:
        raise CorruptError(
            f"{window.where}: expected data.pkl of CRC-32 {pickled.crc32:08x}; got {zlib_ng.crc32(data):08x}. "
            "The file is damaged; copy it again"
        )
    if (member := members.get(f"{prefix}/byteorder")) is not None:
        order = window.read(data_offset(window, member), min(member.nbytes, 16))
        if order == b"big":
            raise UnsupportedError(
                f"{window.where}: expected little-endian elements; got big-endian ones. Load it with torch on a "
                "little-endian machine and save it again"
            )
        if order != b"little":
            raise MalformedError(f"{window.where}: expected byteorder 'little'; got {order!r}. Copy the file again")
    stored = {name: member for name, member in members.items() if name.startswith(f"{prefix}/data/")}
    offsets = data_offsets(window, tuple(stored.values()), directory=members)
    storages = _Storages(window, f"{prefix}/data/", stored, offsets)
    root = parse_pickle(data, where=f"{window.where}: {pickled.name}", persistent=storages.find).value
    records = storages.records() if summed else ()
    return Archive(path=window.file.path, kind="zip", root=root, records=records, saved_as=prefix)


class _Storages:
    """Finds the storages of one archive by persistent id, and collects their checksums."""

    def __init__(self, window: Window, prefix: str, members: dict[str, ZipMember], offsets: dict[str, int]) -> None:
        self._window = window
        self._prefix = prefix
        self._members = members
        self._offsets = offsets
        self._known: dict[tuple[str, str, int], StorageRef] = {}
        self._records: dict[str, Record] = {}

    def find(self, pid: object) -> StorageRef:
        """Storage of a persistent id. Raises ValueError."""
        storage_id = StorageId.parse(pid)
        identity = storage_id.key, storage_id.kind.qualname, storage_id.numel  # quicker to hash than the whole
        known = self._known.get(identity)
        if known is not None:
            return known
        name = self._prefix + storage_id.key
        member = self._members.get(name)
        if member is None:
            raise ValueError(f"a storage {name!r} that the archive does not hold")
        if member.nbytes != storage_id.nbytes:
            raise ValueError(f"a storage of {storage_id.nbytes} bytes; the member {name!r} has {member.nbytes}")
        path, offset, nbytes = self._window.file.path, self._window.start + self._offsets[name], member.nbytes
        self._records[name] = Record(path=path, name=name, offset=offset, nbytes=nbytes, crc32=member.crc32)
        known = self._known[identity] = StorageRef(path=path, offset=offset, nbytes=nbytes, dtype=storage_id.dtype)
        return known

    def records(self) -> tuple[Record, ...]:
        """Recorded checksums of the storages found so far, in the order of the file."""
        return tuple(sorted(self._records.values(), key=lambda record: (record.offset, record.name)))


def _prefix(window: Window, members: dict[str, ZipMember]) -> str:
    """Folder in the archive that holds data.pkl: torch names it after the file."""
    folders = [
        name.removesuffix("/data.pkl") for name in members if name.count("/") == 1 and name.endswith("/data.pkl")
    ]
    if len(folders) != 1:
        raise MalformedError(
            f"{window.where}: expected one member <folder>/data.pkl; got {len(folders)} among {len(members)} members. "
            "This zip archive was not written by torch.save"
        )
    return folders[0]
