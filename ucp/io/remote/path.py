"""A `pathlib.Path` for URLs: a relative path whose first part is the scheme; its methods query the store.

>>> root = RemotePath("s3://bucket/run")
>>> str(root / "step1"), str(root.parent), root.name
('s3://bucket/run/step1', 's3://bucket', 'run')
>>> str((root / "a" / "b").relative_to(root)), root.is_absolute()
('a/b', True)
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import PosixPath, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from ucp.io.remote.listing import ListedObject


class RemotePath(PosixPath):
    """An object of a store, or a folder: a common prefix of keys up to a slash."""

    def __str__(self) -> str:
        """The URL."""
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest.lstrip('/')}" if rest else f"{scheme.rstrip(':')}://"

    def __fspath__(self) -> str:
        """The URL."""
        return str(self)

    def is_absolute(self) -> bool:
        """Always."""
        return True

    def absolute(self) -> Self:
        """The path itself."""
        return self

    def resolve(self, strict: bool = False) -> Self:  # noqa: FBT001, FBT002  # as pathlib has it
        """The path itself: there are no links."""
        return self

    def relative_to(self, *other: Any, **options: Any) -> Any:
        """The part after `other`, as a PurePosixPath."""
        base = PurePosixPath(*(part for path in other for part in type(self)(path).parts))
        return PurePosixPath(*PurePosixPath(*self.parts).relative_to(base).parts)

    def exists(self, **_: bool) -> bool:
        """Whether there is an object or a folder."""
        return self._entry() is not None

    def is_dir(self, **_: bool) -> bool:
        """Whether it is a folder."""
        entry = self._entry()
        return entry is not None and entry.is_folder

    def is_file(self, **_: bool) -> bool:
        """Whether it is an object."""
        entry = self._entry()
        return entry is not None and not entry.is_folder

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def stat(self, **_: bool) -> os.stat_result:
        """Kind, bytes and time. Raises FileNotFoundError."""
        entry = self._require_entry()
        mode = stat.S_IFDIR if entry.is_folder else stat.S_IFREG
        seconds = entry.mtime_ns // 10**9
        times = {"st_mtime_ns": entry.mtime_ns, "st_atime_ns": entry.mtime_ns, "st_ctime_ns": entry.mtime_ns}
        return os.stat_result((mode | 0o444, 0, 0, 1, 0, 0, entry.nbytes, seconds, seconds, seconds), times)

    def iterdir(self) -> Iterator[Self]:  # type: ignore[override]  # a generator of Python 3.13 is an iterator
        """Entries of the folder. Raises FileNotFoundError."""
        for name in list_names(self):
            yield self / name

    def glob(self, pattern: str, **_: Any) -> Iterator[Self]:  # type: ignore[override]
        """Entries of this folder (not below) whose names match."""
        return (path for path in self.iterdir() if PurePosixPath(path.name).match(pattern))

    def open(self, mode: str = "r", *_: Any, encoding: str | None = None, **__: Any) -> IO[Any]:  # type: ignore[override]
        """The object, read into memory. Raises SourceError."""
        data = io.BytesIO(self.read_bytes())
        return data if "b" in mode else io.TextIOWrapper(data, encoding=encoding or "utf-8")

    def read_bytes(self) -> bytes:
        """Bytes of the object. Raises SourceError, FileNotFoundError."""
        from ucp.io.remote.file import RemoteFile

        self._require_entry()
        with RemoteFile(str(self), (str(self),)) as file:
            return file.read(0, file.nbytes)

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        """The object as text. Raises SourceError, FileNotFoundError."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def _entry(self) -> ListedObject | None:
        from ucp.io.remote.listing import entry_of  # imports asyncio, which is slow

        return entry_of(str(self))

    def _require_entry(self) -> ListedObject:
        entry = self._entry()
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return entry


def list_names(path: RemotePath) -> list[str]:
    """Names in a folder. Raises FileNotFoundError, NotADirectoryError."""
    from ucp.io.remote.listing import folder_of

    entries = folder_of(str(path))
    if entries is None:
        number = errno.ENOTDIR if path.is_file() else errno.ENOENT
        raise OSError(number, os.strerror(number), str(path))
    return list(entries)
