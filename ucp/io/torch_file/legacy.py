"""The container of torch.save before 1.6, still written with `_use_new_zipfile_serialization=False`.

Five pickles (magic number, protocol, system, object, storage keys), then per key an int64 count of elements and the
raw elements (torch/serialization.py, `_legacy_save`). The offsets of storages follow from their types and lengths,
which the object names. So the object is unpickled twice: once to collect these, once with the offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.unpickle import Parsed, TruncatedPickleError, parse_pickle
from ucp.io.torch_file.storage import StorageId, StorageRef
from ucp.io.torch_file.zipdir import Window

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_FIRST_NBYTES = 1 << 20


def read_legacy(window: Window) -> object:
    """Read the saved object, with every tensor a reference into the file.

    Raises
    ------
    MalformedError
        No such archive, or a truncated or inconsistent one.
    UnsupportedError
        Written on a big-endian machine.
    """
    reader = _Pickles(window)
    if reader.next().value != _MAGIC:
        raise MalformedError(
            f"{window.where}: expected the magic number of torch.save; got another pickle. Check the file"
        )
    protocol, system = reader.next().value, reader.next().value
    if protocol != _PROTOCOL or not isinstance(system, dict):
        raise MalformedError(f"{window.where}: expected protocol {_PROTOCOL} of torch.save. Copy the file again")
    if system.get("little_endian") is not True:
        raise UnsupportedError(f"{window.where}: expected little-endian elements. Load it with torch and save it again")
    seen: dict[str, StorageId] = {}
    storages: dict[str, StorageRef] = {}

    def note(pid: object) -> object:
        """Record a storage of the object. The value returned in its place is not used."""
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            return pid[1]
        storage_id = StorageId.parse(pid)
        first = seen.setdefault(storage_id.key, storage_id)
        if (first.kind, first.numel) != (storage_id.kind, storage_id.numel):
            raise ValueError(f"a storage {storage_id.key!r} of two kinds or lengths")
        return _view(storages[storage_id.key], storage_id) if storages else None

    place = reader.at
    reader.next(note)
    keys = reader.next().value
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or set(keys) != set(seen):
        raise MalformedError(f"{window.where}: its list of storages does not fit its object. Copy the file again")
    storages.update(_walk(window, keys, seen, start=reader.at))
    reader.at = place
    return reader.next(note).value


class _Pickles:
    """Reads consecutive pickles at the start of a file that may be far longer."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._data = window.read(0, min(window.nbytes, _FIRST_NBYTES))
        self.at = 0

    def next(self, persistent: Callable[[object], object] | None = None) -> Parsed:
        """Read the next pickle, reading more of the file until it is complete."""
        while True:
            try:
                parsed = parse_pickle(self._data, where=self._window.where, start=self.at, persistent=persistent)
            except TruncatedPickleError:
                if len(self._data) == self._window.nbytes:
                    raise
                self._data = self._window.read(0, min(self._window.nbytes, 4 * len(self._data)))
            else:
                self.at = parsed.end
                return parsed


def _view(storage: StorageRef, storage_id: StorageId) -> StorageRef:
    """The view of a storage that the persistent id names."""
    if storage_id.view is None:
        return storage
    start, count = (n * storage_id.itemsize for n in storage_id.view)
    if start + count > storage.nbytes:
        raise ValueError(f"a view past the end of storage {storage_id.key!r}")
    return replace(storage, offset=storage.offset + start, nbytes=count)


def _walk(window: Window, keys: list[str], seen: dict[str, StorageId], *, start: int) -> dict[str, StorageRef]:
    """Offsets of the storages, which are stored one after another from byte `start`."""
    storages = {}
    at = start
    for key in keys:
        storage_id = seen[key]
        numel = int.from_bytes(window.read(at, 8), "little", signed=True)
        if numel != storage_id.numel:
            raise MalformedError(
                f"{window.where}: expected {storage_id.numel} elements of storage {key!r} at byte {at}; got {numel}. "
                "The file is damaged, or its parts were joined wrongly"
            )
        at += 8
        storages[key] = StorageRef(
            path=window.file.path, offset=window.start + at, nbytes=storage_id.nbytes, dtype=storage_id.dtype
        )
        at += storage_id.nbytes
    if at != window.nbytes:
        state = "truncated" if at > window.nbytes else "followed by other bytes"
        raise MalformedError(f"{window.where}: expected {at} bytes; got {window.nbytes}: it is {state}. Copy it again")
    return storages
