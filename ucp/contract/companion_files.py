"""Companion files of a checkpoint, found in the folder that it was saved in (`ucp.contract.companions`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from ucp.contract.companions import companion_extra, is_plain_name, left_text
from ucp.core.index import Index, SourceFile
from ucp.io.staging import MARK, PARTIAL

__all__ = ["SaveFolder", "with_companions"]


@dataclass(frozen=True, slots=True)
class SaveFolder:
    """A folder that checkpoints were saved in."""

    path: Path
    """The folder."""
    newest: str = ""
    """Name of the one saved last, where it is another than the one read: what lies beside belongs to it."""


def with_companions(index: Index, folder: SaveFolder | None, *, is_own: Callable[[Path], bool]) -> Index:
    """`index`, with the files of `folder` as extras, and a line for whatever else lies there.

    Links are never followed, folders not entered. `is_own`: whether an entry is the format's: a checkpoint, or the file
    that names one. Without a `folder` there is nothing beside the checkpoint.
    """
    if folder is None:
        return index
    files: list[SourceFile] = []
    left: dict[str, list[str]] = {}
    try:
        for entry in _entries(folder.path.absolute(), is_own):
            reason = _reason(entry) or _of_another(folder)
            if reason:
                left.setdefault(reason, []).append(ascii(entry.name)[1:-1])
            else:
                files.append(_file(entry))
    except OSError as error:
        left = {f"cannot be read ({error.strerror})": [str(error.filename or folder.path)]}
    return replace(
        index,
        extras=(*index.extras, *(companion_extra(Path(own.path).name, own.path, own.nbytes) for own in files)),
        files=(*index.files, *files),
        dropped=(*index.dropped, *(left_text(names, reason) for reason, names in left.items())),
    )


def _entries(folder: Path, is_own: Callable[[Path], bool]) -> Iterator[os.DirEntry[str]]:
    """Entries of a folder, by name, but for those of the format and those that `ucp` made."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=attrgetter("name")):
            path = Path(entry.path)
            made_here = entry.name == MARK or entry.name.endswith(PARTIAL) or (path / MARK).is_file()
            if not made_here and not is_own(path):
                yield entry


def _reason(entry: os.DirEntry[str]) -> str:
    """Why an entry is not carried along; empty where it is."""
    if entry.is_symlink():
        return "links are not followed"
    if entry.is_dir():
        return "folders are not carried along"
    if not entry.is_file():
        return "no regular files"
    return "" if is_plain_name(entry.name) else "names that are no plain text"


def _of_another(folder: SaveFolder) -> str:
    return f"of {folder.newest}, which was saved last" if folder.newest else ""


def _file(entry: os.DirEntry[str]) -> SourceFile:
    status = entry.stat(follow_symlinks=False)
    return SourceFile(path=entry.path, nbytes=status.st_size, mtime_ns=status.st_mtime_ns, role="companion file")
