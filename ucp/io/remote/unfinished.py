"""What marks a prefix of a bucket as unfinished, and says what was done there.

DST/.ucp-partial/
    conversion.json   which conversion it is, and what it will write; made first, removed last
    owner             who is at work: the process that came last
    files/N.json      an uploaded file: its receipts, and what the store says of the object
    last.json         names of the files that are written last
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any, cast

from ucp.errors import DestinationError, IncompleteError
from ucp.io.destination.goal import describe_process, this_process
from ucp.io.folder import path_of
from ucp.io.remote.link import link_of
from ucp.io.remote.url import key_of
from ucp.io.remote.write import create, is_written, read, remove, stored, stored_below, write

FOLDER = ".ucp-partial"
"""Last part of the prefix of what is said of an unfinished conversion."""

_FIRST = "conversion.json"
_OWNER = "owner"
_LAST = "last.json"
_FILES = "files"

_ABOVE = 2
"""Folders above a path that are asked for: a tag, and a folder in it, lie in what a run saved to."""


def refuse_unfinished(url: str) -> None:
    """Raise IncompleteError when a URL is, or lies in, an unfinished conversion."""
    if not is_written(url):
        return
    path = path_of(url)
    for folder in (path, *path.parents[:_ABOVE]):
        if not key_of(str(folder)) or (folder == path and not (folder / FOLDER).is_dir()):
            continue  # the latter costs nothing: what lies at the path is listed in any case
        if (folder / FOLDER / _FIRST).exists():
            raise IncompleteError(
                f"{folder} is an unfinished conversion; finish it with `ucp convert ... {folder} --resume`"
            )


class Unfinished:
    """What is said of the conversion to one URL."""

    def __init__(self, dst: str) -> None:
        self.dst = dst
        self.url = f"{dst}/{FOLDER}"
        self._signature = _dump({**this_process(), "token": secrets.token_hex(8)})

    def is_there(self) -> bool:
        """Whether a conversion was begun and not finished."""
        return stored(f"{self.url}/{_FIRST}") is not None

    def first(self) -> dict[str, Any]:
        """What is said of the conversion; empty where none was begun. Raises DestinationError."""
        return self._document(_FIRST)

    def begin(self, first: dict[str, Any], *, anew: bool) -> bool:
        """Say which conversion it is, `anew`: in place of another; False where somebody else did it meanwhile."""
        url, data = f"{self.url}/{_FIRST}", _dump(first)
        if not anew:
            return create(url, data)
        write(url, data)
        return True

    def take(self) -> None:
        """From here on, this process is the one at work."""
        write(f"{self.url}/{_OWNER}", self._signature)

    def owner(self) -> str:
        """Which process is at work, or was last, for messages."""
        return describe_process(read(f"{self.url}/{_OWNER}"))

    def check_ours(self) -> None:
        """Raise DestinationError where another process took the place since."""
        owner = read(f"{self.url}/{_OWNER}")
        if owner != self._signature:
            raise DestinationError(
                f"another conversion to {self.dst} ({describe_process(owner)}) began after this one, which leaves the "
                "place to it. Run one at a time"
            )

    def note(self, number: int, line: dict[str, object]) -> None:
        """Add what is known of an uploaded file."""
        write(f"{self.url}/{_FILES}/{number}.json", _dump(line))

    def lines(self) -> Iterator[dict[str, object]]:
        """What is known of uploaded files."""
        url = f"{self.url}/{_FILES}"
        link = link_of(url)
        names = [name for name in stored_below(url) if name.endswith(".json")]
        for found in [link.submit(self._document, f"{_FILES}/{name}") for name in names]:
            yield found.result()

    def note_last(self, names: list[str]) -> None:
        """Say which files are written last."""
        write(f"{self.url}/{_LAST}", _dump({"files": names}))

    def last(self) -> list[str]:
        """Names of files that are written last, as far as an earlier run came so far."""
        return list(self._document(_LAST).get("files", ()))

    def clear(self) -> None:
        """Remove all that is said; at the very end that there is an unfinished conversion."""
        remove(f"{self.url}/{name}" for name in stored_below(self.url) if name != _FIRST)
        remove([f"{self.url}/{_FIRST}"])

    def forget_files(self) -> None:
        """Remove what is said of uploaded files: they are to be written again."""
        remove(f"{self.url}/{name}" for name in stored_below(self.url) if name not in (_FIRST, _OWNER))

    def _document(self, name: str) -> dict[str, Any]:
        text = read(f"{self.url}/{name}")
        try:
            return cast("dict[str, Any]", json.loads(text)) if text else {}
        except ValueError as error:
            raise DestinationError(
                f"{self.url}/{name} is damaged; discard the unfinished conversion with --overwrite, or remove it"
            ) from error


def _dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
