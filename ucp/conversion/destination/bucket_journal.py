"""The journal of a conversion to a bucket, which marks its prefix as unfinished.

DST/.ucp-partial/
    conversion.json   which conversion it is, and the files it writes; created first, removed last
    owner             the process that began or resumed it last
    files/N.json      an uploaded file: its checksums, and the version of the object
    last.json         names of the files that are written last
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any, cast

from ucp.errors import DestinationError
from ucp.io.folder import BUCKET_JOURNAL, PARTIAL
from ucp.io.remote.connections import connect
from ucp.io.remote.write import find_object, find_objects, read, remove, write, write_new
from ucp.io.writing import describe_process, this_process

_OWNER = "owner"
_LAST = "last.json"
_FILES = "files"


class BucketJournal:
    """The journal of the conversion to one URL."""

    def __init__(self, dst: str) -> None:
        self.dst = dst
        self.url = f"{dst}/{PARTIAL}"
        self._signature = _dump({**this_process(), "token": secrets.token_hex(8)})

    def exists(self) -> bool:
        """Whether a conversion was begun and not finished."""
        return find_object(f"{self.url}/{BUCKET_JOURNAL}") is not None

    def head(self) -> dict[str, Any]:
        """Which conversion it is; empty if none was begun. Raises DestinationError."""
        return self._document(BUCKET_JOURNAL)

    def begin(self, head: dict[str, Any], *, replace: bool) -> bool:
        """Record which conversion it is; `replace` another one. False if another process was first."""
        url, data = f"{self.url}/{BUCKET_JOURNAL}", _dump(head)
        if not replace:
            return write_new(url, data)
        write(url, data)
        return True

    def take_over(self) -> None:
        """Record this process as the owner."""
        write(f"{self.url}/{_OWNER}", self._signature)

    def owner(self) -> str:
        """The process that owns the conversion, or did last, for messages."""
        return describe_process(read(f"{self.url}/{_OWNER}"))

    def check_ours(self) -> None:
        """Raise DestinationError when another process took over."""
        owner = read(f"{self.url}/{_OWNER}")
        if owner != self._signature:
            raise DestinationError(
                f"another conversion to {self.dst} ({describe_process(owner)}) began after this one, which therefore "
                "stops. Run one at a time"
            )

    def note(self, number: int, line: dict[str, object]) -> None:
        """Record an uploaded file."""
        write(f"{self.url}/{_FILES}/{number}.json", _dump(line))

    def lines(self) -> Iterator[dict[str, Any]]:
        """Records of the uploaded files."""
        url = f"{self.url}/{_FILES}"
        link = connect(url)
        names = [name for name in find_objects(url) if name.endswith(".json")]
        for future in [link.submit(self._document, f"{_FILES}/{name}") for name in names]:
            yield future.result()

    def note_last(self, names: list[str]) -> None:
        """Record which files are written last."""
        write(f"{self.url}/{_LAST}", _dump({"files": names}))

    def last(self) -> list[str]:
        """The files that are written last; none if an earlier run did not get that far."""
        return list(self._document(_LAST).get("files", ()))

    def clear(self) -> None:
        """Remove the journal: at the very end, the file that marks the conversion as unfinished."""
        remove(f"{self.url}/{name}" for name in find_objects(self.url) if name != BUCKET_JOURNAL)
        remove([f"{self.url}/{BUCKET_JOURNAL}"])

    def forget_files(self) -> None:
        """Remove the records of uploaded files: they are written again."""
        remove(f"{self.url}/{name}" for name in find_objects(self.url) if name not in (BUCKET_JOURNAL, _OWNER))

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
