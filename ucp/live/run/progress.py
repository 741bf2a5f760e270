"""Progress of a load in lines of text, for whoever watches the log of rank 0."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from ucp.contract.protocols import Observer
from ucp.errors import UsageError

__all__ = ["Lines", "observer_of"]

_SECONDS = 2.0
"""Between two lines."""


def observer_of(progress: object, *, rank: int) -> Observer | None:
    """Who is told of the progress on this rank. Raises UsageError for what cannot be told."""
    if isinstance(progress, bool):
        return Lines(sys.stderr) if progress and rank == 0 else None
    if not isinstance(progress, Observer):
        raise UsageError(f"expected progress as True, False or an observer (begin, advance, end); got {progress!r}")
    return progress


class Lines:
    """An observer that writes a line now and then."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._title = ""
        self._total = self._done = 0
        self._began = self._told = time.monotonic()

    def begin(self, *, title: str, nbytes: int) -> None:
        """A stage starts."""
        self._title, self._total, self._done = title, nbytes, 0
        self._began = self._told = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._told >= _SECONDS:
            self._told = now
            self._tell(now)

    def end(self) -> None:
        """The stage is over."""
        self._tell(time.monotonic())

    def _tell(self, now: float) -> None:
        seconds = max(now - self._began, 1e-6)
        share = 100 * self._done / self._total if self._total else 100
        rate = self._done / seconds / 1e6
        self._out.write(f"{self._title}: {share:.0f} % of {self._total:,} bytes, {rate:,.0f} MB/s\n")
        self._out.flush()
