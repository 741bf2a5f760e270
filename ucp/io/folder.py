"""A look at a path that may be anything: what cannot be read there is taken for absent.

Formats tell by it whether a path is a checkpoint of theirs, and say nothing of those that are not. A path may be a URL:
what `os` does for a path on this machine is done here for either.

>>> path_of("s3://bucket/run") / "step1"
RemotePath('s3://bucket/run/step1')
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path

from ucp.io.remote.path import RemotePath, names_of
from ucp.io.remote.url import as_url, check_url, scheme_of

MARK = "ucp-conversion.json"
"""File that says which conversion made a destination; only destinations that have it may be overwritten."""

PARTIAL = ".ucp-partial"
"""Suffix of the folder in which a destination grows."""


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
    """A path that readers can go about in, on this machine or, for a URL, in a store."""
    text = os.fspath(text)
    return RemotePath(text) if is_url(text) else Path(text)


def given(text: str | PathLike[str]) -> Path:
    """The path that a user names; a store is seen afresh there. Raises UsageError for a URL that is not read."""
    text = as_url(os.fspath(text))
    if not is_url(text) or scheme_of(text) == "file":
        return Path(text)
    check_url(text)
    from ucp.io.remote.listing import named

    path = RemotePath(text)
    named(str(path))
    return path


def see_afresh(paths: Iterable[str]) -> None:
    """Ask stores again for those of `paths` that are URLs when they are next looked at."""
    folders = {os.path.dirname(path) for path in paths if is_url(path)}
    if folders:
        from ucp.io.remote.listing import forget

        for folder in folders:
            forget(folder)


def absolute(path: str | PathLike[str]) -> str:
    """The path from the root on, without dots; a URL as it is."""
    text = os.fspath(path)
    return text if is_url(text) else os.path.abspath(text)


def seen_from(folder: Path, path: str) -> Path:
    """`path` as it is seen from `folder`: a URL and an absolute path are what they are wherever they are named."""
    return path_of(path) if is_url(path) or os.path.isabs(path) else folder / path


def is_there(path: str | PathLike[str]) -> bool:
    """Whether anything is at a path, be it a link that leads nowhere."""
    text = os.fspath(path)
    return RemotePath(text).exists() if is_url(text) else os.path.lexists(text)


def names_of_folder(path: str | PathLike[str]) -> list[str]:
    """Names of the entries of a folder, in no order. Raises OSError where it is none, or cannot be listed."""
    text = os.fspath(path)
    return names_of(RemotePath(text)) if is_url(text) else os.listdir(text)


def files_below(folder: Path) -> Iterator[Path]:
    """Every file in a folder and in those in it, in no order."""
    if is_url(str(folder)):
        for own in folder.iterdir():
            yield from files_below(own) if own.is_dir() else (own,)
    else:
        yield from (Path(at) / name for at, _, names in os.walk(folder) for name in names)


def names_in(path: Path) -> Iterator[str]:
    """Names of the entries of a folder, in no order; none where it is no folder or cannot be listed."""
    try:
        yield from names_of_folder(path)
    except OSError:
        return


def short_text(file: Path, *, most_bytes: int) -> str | None:
    """Text of a file of UTF-8 without the blanks around it; None if there is none, or one of more than `most_bytes`."""
    try:
        if not file.is_file() or file.stat().st_size > most_bytes:
            return None
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
