"""What each part has done: a journal for every run of a part, which nobody else writes to.

DST.ucp-partial/parts/<token>.jsonl
    first line: which part, on which machine, which process; then one line per finished task; a last one at the end.
    It is locked while the run goes on, by its worker processes too.

Parts that run twice, at the same time even, write the same bytes to the same places, each with its own journal.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ucp.conversion.journal import line_of
from ucp.io.staging import Staging, read_lines
from ucp.transfer.tasks import Share, Task
from ucp.transfer.worker import Done

__all__ = ["PartJournal", "PartRun", "is_running", "runs_in"]

_SUFFIX = ".jsonl"


class PartJournal:
    """The journal of this run of a part, beside the bytes that it speaks of."""

    def __init__(self, staging: Staging, share: Share) -> None:
        """Begin it. Raises OSError."""
        self.root = staging.data
        path = staging.parts / f"{share.number}-of-{share.parts}-{secrets.token_hex(8)}{_SUFFIX}"
        self._file = path.open("xb", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # somebody may be looking whether it is locked
        self._add({"part": share.number, "parts": share.parts, "host": socket.gethostname(), "process": os.getpid()})

    def rounds(self, todo: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """All at once."""
        yield todo

    def note(self, done: Done) -> None:
        """Add a line for a task that is done."""
        self._add(line_of(done))

    def _add(self, line: dict[str, object]) -> None:
        text = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        while text:
            text = text[self._file.write(text) :]

    def end(self, *, fsync: bool) -> None:
        """Say that all is done."""
        self._add({"end": True})
        if fsync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of it."""
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRun:
    """A run of a part, as its journal has it."""

    share: Share
    """Which part."""
    where: str
    """Machine and process."""
    path: Path
    """Its journal."""
    has_ended: bool
    """Whether it came to its end."""
    lines: Sequence[dict[str, object]]
    """Its tasks."""


def runs_in(staging: Staging) -> Iterator[PartRun]:
    """Every run of a part that left a journal."""
    for path in sorted(staging.parts.glob(f"*{_SUFFIX}")):
        match read_lines(path):
            case [{"part": int(number), "parts": int(parts), "host": host, "process": process}, *lines] if (
                1 <= number <= parts
            ):
                yield PartRun(
                    share=Share(number, parts),
                    where=f"{host}, process {process}",
                    path=path,
                    has_ended=bool(lines) and "end" in lines[-1],
                    lines=lines,
                )


def is_running(run: PartRun) -> bool:
    """Whether a run goes on."""
    try:
        with run.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # the conversion was finished meanwhile
        return False
    return False
