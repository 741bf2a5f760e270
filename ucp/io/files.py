"""Read-only access to the bytes of one source file, or of one file that was split by byte range.

`read_into` fills buffers in place by `preadv`, so that many threads can share one open file. DeepSpeed's FastPersist
splits a file `name` into `name-0.4` to `name-3.4` (deepspeed/runtime/model_checkpointing/writer_factory.py); opened by
the name of the whole, such a file reads as the concatenation of its parts.

>>> import tempfile, pathlib
>>> path = pathlib.Path(tempfile.mkdtemp()) / "x.bin"
>>> _ = path.write_bytes(b"abcdef")
>>> with open_source(str(path)) as file:
...     file.read(2, 3)
b'cde'
"""

from __future__ import annotations

import os
import re
import stat
from bisect import bisect_right
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from ucp.errors import MalformedError, MissingFileError, SourceError, listed

__all__ = ["SourceFile", "open_source", "split_parts"]

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_PART = re.compile(r"-(?P<index>\d+)\.(?P<count>\d+)\Z")
"""Suffix of a part: `x.pt-0.4` is part 0 of 4 of `x.pt`."""


class SourceFile(Protocol):
    """Bytes of a source, read at any place by any thread."""

    path: str
    nbytes: int

    def read_into(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views`, in order, with the bytes from `offset` on. Raises MalformedError past the end of the file."""

    def read_runs(self, buffer: memoryview, starts: Sequence[int]) -> None:
        """Fill `buffer` with equally long runs of the file, one for each of `starts`. Raises MalformedError."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """The `nbytes` bytes at `offset`. Raises MalformedError past the end of the file."""

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""

    def __enter__(self) -> Self:
        """The file itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""


def open_source(path: str) -> SourceFile:
    """The file at `path`, or the concatenation of its parts when only those are there.

    Raises
    ------
    MissingFileError
        Neither the file nor a complete set of parts is there.
    """
    if not os.path.lexists(path):
        parts = split_parts(path)
        if parts:
            return _SplitFile(path, parts)
    return _PlainFile(path)


def split_parts(path: str) -> tuple[str, ...]:
    """Paths of the parts of `path` in order of their bytes; empty when there are none.

    Raises
    ------
    MissingFileError
        Some parts are there and others are not.
    MalformedError
        Parts of two splittings are there.
    """
    folder, name = os.path.split(path)
    found: dict[int, set[int]] = {}
    for entry in _names(folder or "."):
        match = _PART.fullmatch(entry[len(name) :]) if entry.startswith(name) else None
        if match:
            found.setdefault(int(match["count"]), set()).add(int(match["index"]))
    if not found:
        return ()
    if len(found) > 1:
        raise MalformedError(
            f"expected one set of parts of {path}; got sets of {sorted(found)} parts. Remove those of the other run"
        )
    ((count, indices),) = found.items()
    _check_parts(path, count, indices)
    return tuple(f"{path}-{index}.{count}" for index in range(count))


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _check_parts(path: str, count: int, indices: set[int]) -> None:
    surplus = sorted(index for index in indices if index >= count)
    if surplus:
        raise MalformedError(f"expected parts 0 to {count - 1} of {path}; got also part {surplus[0]} of {count}")
    missing = [f"{path}-{index}.{count}" for index in range(count) if index not in indices]
    if missing:
        raise MissingFileError(
            f"{path} is split into {count} parts and {len(missing)} are not there; copy them:\n{listed(missing)}"
        )


class _PlainFile:
    """One regular file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.nbytes, self._descriptor = _open(path)

    def read_into(self, views: Sequence[memoryview], offset: int) -> None:
        rest = [view.cast("B") for view in views if view.nbytes]
        first = 0
        while first < len(rest):
            got = self._read_some(rest[first : first + _IOV_MAX], offset)
            offset += got
            while first < len(rest) and got >= rest[first].nbytes:
                got -= rest[first].nbytes
                first += 1
            if got:
                rest[first] = rest[first][got:]

    def read_runs(self, buffer: memoryview, starts: Sequence[int]) -> None:
        nbytes = len(buffer) // len(starts)
        try:
            for at, start in zip(range(0, len(buffer), nbytes), starts, strict=True):
                view = buffer[at : at + nbytes]
                got = os.preadv(self._descriptor, (view,), start)
                if got < nbytes:
                    self.read_into([view[got:]], start + got)
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise _truncated(self.path, self.nbytes, offset, nbytes)
        data = self._pread(offset, nbytes)
        if len(data) == nbytes:
            return data
        buffer = bytearray(nbytes)
        self.read_into([memoryview(buffer)], offset)
        return bytes(buffer)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pread(self, offset: int, nbytes: int) -> bytes:
        try:
            return os.pread(self._descriptor, nbytes, offset)
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def _read_some(self, views: list[memoryview], offset: int) -> int:
        try:
            got = os.preadv(self._descriptor, views, offset)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if got == 0:
            raise _truncated(self.path, self.nbytes, offset, sum(view.nbytes for view in views))
        return got


class _SplitFile:
    """Several files read as one."""

    def __init__(self, path: str, parts: Sequence[str]) -> None:
        self.path = path
        self._parts: list[_PlainFile] = []
        self._starts: list[int] = []
        self.nbytes = 0
        try:
            for part in parts:
                self._starts.append(self.nbytes)
                self._parts.append(_PlainFile(part))
                self.nbytes += self._parts[-1].nbytes
        except SourceError:
            self.close()
            raise

    def read_into(self, views: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(view.nbytes for view in views)
        if offset < 0 or offset + nbytes > self.nbytes:
            raise _truncated(self.path, self.nbytes, offset, nbytes)
        for view in views:
            rest = view.cast("B") if view.nbytes else view
            while rest.nbytes:
                index = bisect_right(self._starts, offset) - 1
                part, within = self._parts[index], offset - self._starts[index]
                count = min(rest.nbytes, part.nbytes - within)
                part.read_into([rest[:count]], within)
                rest = rest[count:]
                offset += count

    def read_runs(self, buffer: memoryview, starts: Sequence[int]) -> None:
        nbytes = len(buffer) // len(starts)
        for at, start in zip(range(0, len(buffer), nbytes), starts, strict=True):
            self.read_into([buffer[at : at + nbytes]], start)

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise _truncated(self.path, self.nbytes, offset, nbytes)
        buffer = bytearray(nbytes)
        self.read_into([memoryview(buffer)], offset)
        return bytes(buffer)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(path: str) -> tuple[int, int]:
    """Bytes of the file and its descriptor; only regular files are opened (a pipe would block)."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise MalformedError(f"expected a regular file; got {_kind(mode)} at {path}")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise MissingFileError(f"expected a file at {path}; nothing is there. Check the path, or copy it") from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return os.fstat(descriptor).st_size, descriptor


def _kind(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "a special file"


def _unreadable(path: str, error: Exception) -> SourceError:
    if isinstance(error, OSError):
        return SourceError(f"cannot read {path}: {error.strerror}")
    return SourceError(f"cannot read {path!r}: expected the name of a file; it holds a character that no name can hold")


def _truncated(path: str, total: int, offset: int, nbytes: int) -> MalformedError:
    return MalformedError(
        f"expected {nbytes} bytes at {offset}; the file ends at {total}: {path} is truncated. Copy it again"
    )
