"""A look at a path that may be anything: what cannot be read there is taken for absent.

Formats tell by it whether a path is a checkpoint of theirs, and say nothing of those that are not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["names_in", "short_text", "url_scheme"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""Examples: s3://bucket/run, and s3:/bucket/run, which is what a path makes of it."""


def url_scheme(path: Path) -> str:
    """Scheme of a URL that was passed as a path; empty for a path.

    >>> url_scheme(Path("s3://bucket/run")), url_scheme(Path("run/s3:/x"))
    ('s3', '')
    """
    found = _URL.match(str(path))
    return found[1] if found else ""


def names_in(path: Path) -> Iterator[str]:
    """Names of the entries of a folder, in no order; none where it is no folder or cannot be listed."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                yield entry.name
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
