"""Read-only access to the bytes of one source file, or of one file that was split by byte range.

`read_into` fills buffers in place by `preadv`, so that many threads can share one open file. DeepSpeed's FastPersist
splits a file `name` into `name-0.4` to `name-3.4` (deepspeed/runtime/model_checkpointing/writer_factory.py); opened as
`name`, it reads as the concatenation of its parts. An object of a store, named by a URL, has the same interface
(`ucp.io.remote.file`).

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
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self, cast

from ucp.core.tensor import GAP
from ucp.errors import MalformedError, MissingFileError, SourceError, format_list
from ucp.io.folder import exists, is_url, names_in, path_of
from ucp.io.json_text import NotJson, parsed

if TYPE_CHECKING:
    from ucp.core.index import SourceFile as Listed
    from ucp.io.remote.file import RemoteFile
    from ucp.io.remote.prefetch import Extent, Prefetcher

_IOV_MAX = os.sysconf("SC_IOV_MAX")
OPEN_FILES = 128
"""Most source files held open by one thread."""
_PART = re.compile(r"-(?P<index>\d+)\.(?P<count>\d+)\Z")
"""Suffix of a part: `x.pt-0.4` is part 0 of 4 of `x.pt`."""
_MOST_JSON = 256 << 20
"""Bytes of the largest JSON file that is read."""


def join_ranges(
    ranges: Iterable[tuple[int, int]], *, gap: int = 0, limit: int = sys.maxsize
) -> Iterator[tuple[int, int, int]]:
    """Joins ranges of a file into reads (first byte, one past the last, number of ranges), in their order.

    A read joins ranges in increasing order with at most `gap` bytes between two, up to `limit` bytes together. Without
    a gap, only ranges that follow one another exactly are joined, so that each can be read into a buffer of its own.

    >>> list(join_ranges([(0, 4), (4, 6), (9, 12)])), list(join_ranges([(0, 4), (4, 6), (9, 12)], gap=3))
    ([(0, 6, 2), (9, 12, 1)], [(0, 12, 3)])
    """
    low = high = previous_start = count = 0
    for start, stop in ranges:
        is_near = previous_start <= start <= high + gap if gap else start == high
        if count and is_near and stop - low <= limit:
            high, count = max(high, stop), count + 1
        else:
            if count:
                yield low, high, count
            low, high, count = start, stop, 1
        previous_start = start
    if count:
        yield low, high, count


class SourceFile(Protocol):
    """Bytes of a source, of one file or of several read as one, read at any place by any thread."""

    path: str
    """File, or URL."""
    nbytes: int
    """Bytes."""
    gap: int
    """Unneeded bytes between two ranges up to which one call reads both."""

    def read_into(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views`, in order, with the bytes from `offset` on. Raises MalformedError past the end of the file."""

    def read_runs(self, buffer: memoryview, starts: Sequence[int]) -> None:
        """Fill `buffer` with equally long runs of the file, one for each of `starts`. Raises MalformedError."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """The `nbytes` bytes at `offset`. Raises MalformedError past the end of the file."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise truncated_error(self.path, self.nbytes, offset, nbytes)
        data = bytearray(nbytes)
        self.read_into([memoryview(data)], offset)
        return bytes(data)

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Start to fetch ranges (first byte, one past the last) that will be read in this order, if it is remote."""

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


class LocalFile(SourceFile):
    """A source on this machine."""

    gap = GAP

    def __init__(self, path: str, parts: Sequence[str]) -> None:
        self.path = path
        self.nbytes = 0
        self._starts: list[int] = []
        self._descriptors: list[int] = []
        try:
            for part in parts:
                nbytes, descriptor = _open(part)
                self._starts.append(self.nbytes)
                self._descriptors.append(descriptor)
                self.nbytes += nbytes
        except SourceError:
            self.close()
            raise

    def read_into(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views`, in order, with the bytes from `offset` on. Raises MalformedError past the end of the file."""
        buffers = [view.cast("B") for view in views if view.nbytes]
        first = 0
        while first < len(buffers):
            batch = buffers[first : first + _IOV_MAX]
            descriptor, within = self._place(offset)
            try:
                got = os.preadv(descriptor, batch, within)
            except OSError as error:
                raise _read_error(self.path, error) from error
            if got == 0:
                raise truncated_error(self.path, self.nbytes, offset, sum(view.nbytes for view in batch))
            offset += got
            while first < len(buffers) and got >= buffers[first].nbytes:
                got -= buffers[first].nbytes
                first += 1
            if got:
                buffers[first] = buffers[first][got:]

    def read_runs(self, buffer: memoryview, starts: Sequence[int]) -> None:
        """Fill `buffer` with equally long runs of the file, one for each of `starts`. Raises MalformedError."""
        nbytes = len(buffer) // len(starts)
        descriptor = self._descriptors[0] if len(self._descriptors) == 1 else None
        for position, start in zip(range(0, len(buffer), nbytes), starts, strict=True):
            view = buffer[position : position + nbytes]
            try:
                got = 0 if descriptor is None else os.preadv(descriptor, (view,), start)
            except OSError as error:
                raise _read_error(self.path, error) from error
            if got < nbytes:
                self.read_into([view[got:]], start + got)

    def read(self, offset: int, nbytes: int) -> bytes:
        """The `nbytes` bytes at `offset`. Raises MalformedError past the end of the file."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise truncated_error(self.path, self.nbytes, offset, nbytes)
        descriptor, within = self._place(offset)
        try:
            data = os.pread(descriptor, nbytes, within)
        except OSError as error:
            raise _read_error(self.path, error) from error
        return data if len(data) == nbytes else super().read(offset, nbytes)

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Nothing: the system reads ahead."""

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _place(self, offset: int) -> tuple[int, int]:
        """Descriptor of the part that contains byte `offset`, and the position of that byte in it."""
        part = bisect_right(self._starts, offset) - 1 if len(self._starts) > 1 else 0
        return self._descriptors[part], offset - self._starts[part]


class Sources:
    """Open source files of one thread, the least recently used closed first."""

    def __init__(self, files: Iterable[Listed] = (), *, limit: int = OPEN_FILES) -> None:
        """`files`: as an index lists them; objects of stores are read only while they have the listed version."""
        self._limit = limit
        self._versions = {file.path: file.version for file in files if file.version}
        self._open: OrderedDict[str, SourceFile] = OrderedDict()
        self._prefetcher: Prefetcher | None = None

    def get(self, path: str) -> SourceFile:
        """The file at `path`, opened if it is not open."""
        file = self._open.get(path)
        if file is None:
            ahead, version = (self._get_prefetcher(), self._versions.get(path, "")) if is_url(path) else (None, "")
            file = self._open[path] = open_source(path, version=version, prefetcher=ahead)
            if len(self._open) > self._limit:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(path)
        return file

    @property
    def paths(self) -> tuple[str, ...]:
        """Files that are open."""
        return tuple(self._open)

    def prefetch(self, extents: Iterable[Extent], *, batch: int) -> None:
        """Announce reads of remote files, roughly in this order, as announcement number `batch`."""
        remote = [extent for extent in extents if is_url(extent.path)]
        if remote:
            self._get_prefetcher().expect(remote, batch=batch)

    def cancel(self, *, batch: int) -> None:
        """Cancel the reads of announcements up to number `batch`."""
        if self._prefetcher is not None:
            self._prefetcher.cancel(batch=batch)

    def close(self) -> None:
        """Close all files, and cancel announced reads."""
        if self._prefetcher is not None:
            self._prefetcher.cancel(batch=None)
        while self._open:
            self._open.popitem()[1].close()

    def _get_prefetcher(self) -> Prefetcher:
        from ucp.io.remote.prefetch import Prefetcher

        if self._prefetcher is None:
            self._prefetcher = Prefetcher(lambda path: cast("RemoteFile", self.get(path)))  # only URLs are announced
        return self._prefetcher


def open_source(path: str, *, version: str = "", prefetcher: Prefetcher | None = None) -> SourceFile:
    """The file at `path`, or the concatenation of its parts when only those are there.

    `version`, `prefetcher`: of an object in a bucket, its expected version and who prefetches it.

    Raises
    ------
    MissingFileError
        Neither the file nor a complete set of parts is there.
    """
    if is_url(path):
        from ucp.io.remote.file import RemoteFile

        return RemoteFile(path, parts_of(path), version=version, prefetcher=prefetcher)
    return LocalFile(path, parts_of(path))


def read_object(path: str) -> dict[str, object]:
    """The JSON object in a file. Raises MalformedError."""
    with open_source(path) as file:
        if file.nbytes > _MOST_JSON:
            raise MalformedError(
                f"expected a JSON document of at most {_MOST_JSON:,} bytes in {path}. Copy the file again"
            )
        data = file.read(0, file.nbytes)
    try:
        document = parsed(data)
    except NotJson as error:
        raise MalformedError(f"expected JSON in {path}; {error}. Copy the file again") from error
    if not isinstance(document, dict):
        raise MalformedError(f"expected a JSON object in {path}; got a {type(document).__name__}. Copy the file again")
    return document


def parts_of(path: str) -> tuple[str, ...]:
    """The file itself, or the parts that it is split into."""
    return (path,) if exists(path) else split_parts(path) or (path,)


def close_connections() -> None:
    """Close connections to stores before a fork: a child must not inherit them."""
    if "ucp.io.remote.ends" in sys.modules:
        from ucp.io.remote import connections, ends

        lock = connections.fork_lock()
        if lock.acquire(blocking=False):  # otherwise a conversion in another thread needs its connections
            try:
                ends.clear()
                connections.close_connections()
            finally:
                lock.release()


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
    sets: dict[int, set[int]] = {}
    for entry in names_in(path_of(folder or ".")):
        match = _PART.fullmatch(entry[len(name) :]) if entry.startswith(name) else None
        if match:
            sets.setdefault(int(match["count"]), set()).add(int(match["index"]))
    if not sets:
        return ()
    if len(sets) > 1:
        raise MalformedError(
            f"expected one set of parts of {path}; got sets of {sorted(sets)} parts. Remove those of the other run"
        )
    ((count, indices),) = sets.items()
    surplus = sorted(index for index in indices if index >= count)
    if surplus:
        raise MalformedError(f"expected parts 0 to {count - 1} of {path}; got also part {surplus[0]} of {count}")
    parts = [f"{path}-{index}.{count}" for index in range(count)]
    missing = [part for index, part in enumerate(parts) if index not in indices]
    if missing:
        raise MissingFileError(
            f"{path} is split into {count} parts and {len(missing)} are not there; copy them:\n{format_list(missing)}"
        )
    return tuple(parts)


def _open(path: str) -> tuple[int, int]:
    """Bytes of the file and its descriptor; only regular files are opened (a pipe would block)."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a special file"
            raise MalformedError(f"expected a regular file; got {kind} at {path}")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise MissingFileError(f"expected a file at {path}; nothing is there. Check the path, or copy it") from error
    except (OSError, ValueError) as error:
        raise _read_error(path, error) from error
    return os.fstat(descriptor).st_size, descriptor


def _read_error(path: str, error: Exception) -> SourceError:
    if isinstance(error, OSError):
        return SourceError(f"cannot read {path}: {error.strerror}")
    return SourceError(f"cannot read {path!r}: expected the name of a file; it holds a character that no name can hold")


def truncated_error(path: str, total: int, offset: int, nbytes: int) -> MalformedError:
    """The error for bytes past the end of a file of `total` bytes."""
    return MalformedError(
        f"expected {nbytes} bytes at {offset}; the file ends at {total}: {path} is truncated. Copy it again"
    )
