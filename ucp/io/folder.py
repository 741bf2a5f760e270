"""File-system queries for local paths and URLs; what cannot be read counts as absent.

Formats use them to recognise their checkpoints.

>>> path_of("s3://bucket/run") / "step1"
RemotePath('s3://bucket/run/step1')
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path

from ucp.errors import IncompleteError, UsageError
from ucp.io.remote.path import RemotePath, list_names
from ucp.io.remote.url import as_url, check_url, key_of, scheme_of

MARK = "ucp-conversion.json"
"""File that says which conversion made a destination; only destinations that have it may be overwritten."""

PARTIAL = ".ucp-partial"
"""Suffix of the folder in which a destination grows; in a bucket, name of the folder of its journal."""

JOURNAL = "journal.jsonl"
"""File in that folder that lists the finished tasks of a conversion."""

BUCKET_JOURNAL = "conversion.json"
"""File in that folder of a bucket while the conversion is not finished."""

_LEVELS_ABOVE = 2
"""Folders above a path in a bucket that are looked at: a run saves to a tag, and to a folder in it."""


def url_scheme(path: Path) -> str:
    """Scheme of a URL that was passed as a path; empty for a path.

    >>> url_scheme(Path("s3://bucket/run")), url_scheme(Path("run/s3:/x"))
    ('s3', '')
    """
    return scheme_of(str(path))


def is_url(path: str) -> bool:
    """Whether a path of an index or of a user is a URL."""
    return "://" in path and bool(scheme_of(path))


def path_of(text: str | PathLike[str]) -> Path:
    """A local path, or for a URL a `RemotePath`."""
    text = os.fspath(text)
    return RemotePath(text) if is_url(text) else Path(text)


def parse_path(text: str | PathLike[str]) -> Path:
    """The path that a user gives; cached listings of it are dropped. Raises UsageError if it is not a path or URL."""
    if not isinstance(text, str | PathLike) or not (path_text := os.fspath(text)) or not isinstance(path_text, str):
        raise UsageError(f"expected a path or the URL of a bucket; got {text!r}")
    text = as_url(path_text)
    if not is_url(text) or scheme_of(text) == "file":
        return Path(text)
    check_url(text)
    from ucp.io.remote.listing import refresh_root

    path = RemotePath(text)
    refresh_root(str(path))
    return path


def refresh(paths: Iterable[str]) -> None:
    """Drop cached listings of those of `paths` that are URLs."""
    folders = {os.path.dirname(path) for path in paths if is_url(path)}
    if folders:
        from ucp.io.remote.listing import forget

        for folder in folders:
            forget(folder)


def to_absolute(path: str | PathLike[str]) -> str:
    """Absolute path without `.` and `..`; a URL is unchanged."""
    text = os.fspath(path)
    return text if is_url(text) else os.path.abspath(text)


def resolve_from(folder: Path, path: str) -> Path:
    """`path` relative to `folder`; URLs and absolute paths are unchanged."""
    return path_of(path) if is_url(path) or os.path.isabs(path) else folder / path


def exists(path: str | PathLike[str]) -> bool:
    """Whether anything is at a path, even a broken link."""
    text = os.fspath(path)
    return RemotePath(text).exists() if is_url(text) else os.path.lexists(text)


def names_of_folder(path: str | PathLike[str]) -> list[str]:
    """Names of the entries of a folder, in no order. Raises OSError if it is not a folder, or cannot be listed."""
    text = os.fspath(path)
    return list_names(RemotePath(text)) if is_url(text) else os.listdir(text)


def files_below(folder: Path) -> Iterator[Path]:
    """Every file in a folder and its subfolders, in no order."""
    if is_url(str(folder)):
        for entry in folder.iterdir():
            yield from files_below(entry) if entry.is_dir() else (entry,)
    else:
        yield from (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)


def names_in(path: Path) -> Iterator[str]:
    """Names of the entries of a folder, in no order; none if it is not a folder or cannot be listed."""
    try:
        yield from names_of_folder(path)
    except OSError:
        return


def read_short_text(file: Path, *, most_bytes: int) -> str | None:
    """Text of a UTF-8 file without surrounding blanks; None if it cannot be read, or has more than `most_bytes`."""
    try:
        if not file.is_file() or file.stat().st_size > most_bytes:
            return None
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def refuse_partial(path: Path) -> None:
    """Raise IncompleteError when `path` is, or lies in, a conversion that is not finished."""
    if is_url(str(path)):
        from ucp.io.remote.write import is_writable

        if not is_writable(str(path)):
            return
        for folder in (path, *path.parents[:_LEVELS_ABOVE]):
            if not key_of(str(folder)) or (folder == path and not (folder / PARTIAL).is_dir()):
                continue  # the second test costs no request: what lies at `path` is listed in any case
            if (folder / PARTIAL / BUCKET_JOURNAL).exists():
                raise IncompleteError(
                    f"{folder} is an unfinished conversion; finish it with `ucp convert ... {folder} --resume`"
                )
        return
    for folder in (path, *path.parents):
        if folder.name.endswith(PARTIAL) and (folder / JOURNAL).exists():
            dst = folder.with_name(folder.name.removesuffix(PARTIAL))
            raise IncompleteError(
                f"{folder} is an unfinished conversion to {dst}; finish it with `ucp convert ... {dst} --resume`"
            )
