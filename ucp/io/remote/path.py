"""A path whose text is a URL, for readers that go about in folders by `pathlib`.

Below it is a relative path whose first part is the scheme; only what asks the file system is done otherwise, and the
text has both slashes.

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
    from ucp.io.remote.listing import Entry


class RemotePath(PosixPath):
    """An object of a store, or a folder of them: what their keys have before a slash."""

    def __str__(self) -> str:
        """The URL."""
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest.lstrip('/')}" if rest else f"{scheme.rstrip(':')}://"

    def __fspath__(self) -> str:
        """The URL."""
        return str(self)

    def is_absolute(self) -> bool:
        """Always: a URL is not counted from the current folder."""
        return True

    def absolute(self) -> Self:
        """The path itself."""
        return self

    def resolve(self, strict: bool = False) -> Self:  # noqa: FBT001, FBT002  # as pathlib has it
        """The path itself: there are no links."""
        return self

    def relative_to(self, *other: Any, **options: Any) -> Any:
        """What follows `other`, as a path of its own."""
        above = PurePosixPath(*(part for path in other for part in type(self)(path).parts))
        return PurePosixPath(*PurePosixPath(*self.parts).relative_to(above).parts)

    def exists(self, **_: bool) -> bool:
        """Whether an object, or a folder of some, is there."""
        return self._entry() is not None

    def is_dir(self, **_: bool) -> bool:
        """Whether it is a folder."""
        found = self._entry()
        return found is not None and found.is_folder

    def is_file(self, **_: bool) -> bool:
        """Whether it is an object."""
        found = self._entry()
        return found is not None and not found.is_folder

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def stat(self, **_: bool) -> os.stat_result:
        """Kind, bytes and time. Raises FileNotFoundError."""
        found = self._found()
        mode = stat.S_IFDIR if found.is_folder else stat.S_IFREG
        seconds = found.mtime_ns // 10**9
        times = {"st_mtime_ns": found.mtime_ns, "st_atime_ns": found.mtime_ns, "st_ctime_ns": found.mtime_ns}
        return os.stat_result((mode | 0o444, 0, 0, 1, 0, 0, found.nbytes, seconds, seconds, seconds), times)

    def iterdir(self) -> Iterator[Self]:  # type: ignore[override]  # a generator of Python 3.13 is an iterator
        """What lies in the folder. Raises FileNotFoundError."""
        for name in names_of(self):
            yield self / name

    def glob(self, pattern: str, **_: Any) -> Iterator[Self]:  # type: ignore[override]
        """Entries of this folder alone whose names match."""
        return (own for own in self.iterdir() if PurePosixPath(own.name).match(pattern))

    def open(self, mode: str = "r", *_: Any, encoding: str | None = None, **__: Any) -> IO[Any]:  # type: ignore[override]
        """The object, all of it in memory: for small ones. Raises SourceError."""
        data = io.BytesIO(self.read_bytes())
        return data if "b" in mode else io.TextIOWrapper(data, encoding=encoding or "utf-8")

    def read_bytes(self) -> bytes:
        """All of the object. Raises SourceError, FileNotFoundError."""
        from ucp.io.remote.file import RemoteFile

        self._found()
        with RemoteFile(str(self), (str(self),)) as file:
            return file.read(0, file.nbytes)

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        """The object as text. Raises SourceError, FileNotFoundError."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def _entry(self) -> Entry | None:
        from ucp.io.remote.listing import entry_of  # with asyncio, which takes longer to import than a plan to be made

        return entry_of(str(self))

    def _found(self) -> Entry:
        found = self._entry()
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return found


def names_of(path: RemotePath) -> list[str]:
    """Names in a folder. Raises FileNotFoundError, NotADirectoryError."""
    from ucp.io.remote.listing import folder_of

    found = folder_of(str(path))
    if found is None:
        number = errno.ENOTDIR if path.is_file() else errno.ENOENT
        raise OSError(number, os.strerror(number), str(path))
    return list(found)
