"""Companion files of a checkpoint, found in the folder that it was saved in (`ucp.contract.companions`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ucp.contract.companions import adapter_text, companion_extra, is_adapter, is_plain_name, left_text
from ucp.core.index import Index, SourceFile
from ucp.io.destination.mark import MARK
from ucp.io.destination.staging import PARTIAL
from ucp.io.folder import absolute, names_of_folder, path_of
from ucp.io.identity import source_file

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
    adapter: list[str] = []
    try:
        for entry in _entries(path_of(absolute(folder.path)), is_own):
            if is_adapter(entry.name):
                adapter.append(entry.name)
            reason = _reason(entry) or _of_another(folder)
            if reason:
                left.setdefault(reason, []).append(ascii(entry.name)[1:-1])
            else:
                files.append(source_file(str(entry), "companion file"))
    except OSError as error:
        left = {f"cannot be read ({error.strerror})": [str(error.filename or folder.path)]}
    unmerged = (adapter_text(adapter),) if adapter else ()
    return replace(
        index,
        notes=(*index.notes, *unmerged),
        extras=(*index.extras, *(companion_extra(os.path.basename(own.path), own.path, own.nbytes) for own in files)),
        files=(*index.files, *files),
        dropped=(*index.dropped, *(left_text(names, reason) for reason, names in left.items()), *unmerged),
    )


def _entries(folder: Path, is_own: Callable[[Path], bool]) -> Iterator[Path]:
    """Entries of a folder, by name, but for those of the format and those that `ucp` made."""
    for name in sorted(names_of_folder(folder)):
        path = folder / name
        made_here = name == MARK or name.endswith(PARTIAL) or (path / MARK).is_file()
        if not made_here and not is_own(path):
            yield path


def _reason(entry: Path) -> str:
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
