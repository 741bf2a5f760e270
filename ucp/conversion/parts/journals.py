"""Journals of parts: every run of a part writes its own file.

DST.ucp-partial/parts/K-of-N-<token>.jsonl
    head    part, machine and process; identity of the folder at the start; runs that had ended before
    lost    files that another run had noted and that are gone (before they are created again), or failed to sync
    files   files that the run writes to, once all of them exist at full length, before it writes to them
    task    one line per finished task
    end     that all is done, whether it was synced, and the digest of all lines above: the seal
    The run and its worker processes hold a lock on it.

If a part is run twice, even at the same time, both runs write the same bytes to the same places, with two journals.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ucp.conversion.destination.staging import Staging, lines_of
from ucp.conversion.journal import Line, to_line
from ucp.errors import DestinationError
from ucp.io.writing import sync
from ucp.transfer.plan.tasks import Share, Task
from ucp.transfer.worker import Done

_SUFFIX = ".jsonl"

_NAME = re.compile(r"(\d{1,9})-of-(\d{1,9})-[0-9a-f]+\.jsonl")
"""Example: 3-of-8-0f1e2d3c4b5a6978.jsonl."""

_TASK = b'{"task":'
"""How a line of a task begins."""


class PartJournal:
    """The journal of this run of a part."""

    def __init__(self, staging: Staging, share: Share, *, over: Iterable[str] = ()) -> None:
        """Begin it. `over`: journals of unsealed runs that have ended: this run reads back what they wrote.

        Raises OSError.
        """
        self.root = staging.data
        self._dst = staging.dst
        self._digest = xxhash.xxh3_64()
        self._path = staging.parts / f"{share.number}-of-{share.parts}-{secrets.token_hex(8)}{_SUFFIX}"
        self._file = self._path.open("xb", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # waits while another process tests the lock
        head = {"part": share.number, "parts": share.parts, "host": socket.gethostname(), "process": os.getpid()}
        self._add({**head, "identity": staging.identity(), "over": list(over)})

    def lose(self, paths: Sequence[str]) -> None:
        """Record that what other runs wrote to these files may be lost."""
        self._add({"lost": list(paths)})
        self._sync()

    def begin(self, paths: Sequence[str]) -> None:
        """Record that these files exist, before anything is written to them."""
        self._add({"files": list(paths)})
        self._sync()

    def rounds(self, todo: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """All tasks at once."""
        yield todo

    def note(self, done: Done) -> None:
        """Add a line for a task that is done."""
        self._add(to_line(done))

    def end(self, *, fsync: bool) -> None:
        """Record that all is done. `fsync`: and that it is on the disk."""
        self._add(_make_seal(self._digest.hexdigest(), synced=fsync))
        if fsync:
            self._sync()

    def _add(self, line: Line) -> None:
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            is_there = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise DestinationError(
                f"the working folder of {self._dst} was removed, or begun anew, while this part was running; run the "
                "part again if it is still needed"
            )
        self._digest.update(text)
        rest = memoryview(text)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _sync(self) -> None:
        """Wait until the journal and its directory entry are on the disk."""
        os.fsync(self._file.fileno())
        sync(self._path.parent)

    def close(self) -> None:
        """Close the journal and release its lock."""
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRun:
    """A run of a part, read from its journal."""

    share: Share
    """Which part."""
    where: str
    """Machine and process."""
    path: Path
    """Its journal."""
    identity: str = ""
    """What `Staging.identity` was when it began."""
    finished_before: frozenset[str] = frozenset()
    """Names of journals of unsealed runs that had ended before it began."""
    lost: tuple[str, ...] = ()
    """Files that were gone and that it created again, or that it could not sync."""
    files: tuple[str, ...] = ()
    """Files that it writes to, all of which existed then; empty if it did not get that far."""
    has_ended: bool = False
    """Whether it ran to its end."""
    is_sealed: bool = False
    """Whether all that it wrote was synced before its end, and its journal is unchanged since."""

    def is_trusted_in(self, identity: str) -> bool:
        """Whether its reports are trusted in a folder with this identity."""
        return self.is_sealed and self.identity == identity

    def read_lines(self) -> Iterator[Line]:
        """Lines of its journal, up to the first that cannot be read."""
        yield from lines_of(_read_lines(self.path))


def list_runs(staging: Staging) -> Iterator[PartRun]:
    """Every run of a part that left a journal."""
    for path in sorted(staging.parts.glob(f"*{_SUFFIX}")):
        name = _NAME.fullmatch(path.name)
        if name and 1 <= int(name[1]) <= int(name[2]):
            yield _parse_run(path, Share(int(name[1]), int(name[2])))


def _parse_run(path: Path, share: Share) -> PartRun:
    """A run, read from its journal; lines of tasks are not parsed, as there may be many."""
    text = _read_lines(path)
    *above, last = text or [b""]
    values: dict[str, object] = {}
    lost: list[str] = []
    for line in lines_of(text_line for text_line in text if not text_line.startswith(_TASK)):
        values |= line
        lost += _to_texts(line.get("lost"))
    end = next(lines_of([last]), {})
    return PartRun(
        share=share,
        where=f"{values['host']}, process {values.get('process')}" if "host" in values else "an unknown machine",
        path=path,
        identity=str(values.get("identity", "")),
        finished_before=frozenset(_to_texts(values.get("over"))),
        lost=tuple(lost),
        files=_to_texts(values.get("files")),
        has_ended="end" in end,
        is_sealed=end == _make_seal(xxhash.xxh3_64_hexdigest(b"".join(above)), synced=True),
    )


def _make_seal(digest: str, *, synced: bool) -> Line:
    """The last line; it does not fit if a line above was changed, removed or added."""
    return {"end": True, "synced": synced, "digest": digest}


def _to_texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _read_lines(path: Path) -> list[bytes]:
    """Lines of a journal; none where it is gone."""
    try:
        return path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def is_running(run: PartRun) -> bool:
    """Whether a run is still running."""
    try:
        with run.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # the conversion was finished meanwhile
        return False
    return False
