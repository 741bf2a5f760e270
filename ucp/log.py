"""What observers and reports tell, in the log of the program: `logging.getLogger("ucp")`.

Stages, notes and what was left behind are logged at INFO, warnings and problems at WARNING. `ucp` sets no level and
adds a `NullHandler` alone, so nothing is printed unless the program configures logging.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ucp.core.text.page import Report, Section
from ucp.core.text.units import nbytes_text, printable, seconds_text

if TYPE_CHECKING:
    from ucp.contract.protocols import Observer

LOGGER = logging.getLogger("ucp")
LOGGER.addHandler(logging.NullHandler())

_ALARMING = frozenset({"Warnings", "Damage", "Copies that differ", "Missing", "Unexpected", "Problems"})
"""Titles of lists that are logged as warnings."""
_MOST = 20
"""Items of a list that are logged."""


class LoggedObserver:
    """An observer that logs when stages begin and end, and passes everything on to another observer, if there is one.

    >>> LoggedObserver(None).advance(1)
    """

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._title, self._began = "", 0.0

    def begin(self, *, title: str, nbytes: int) -> None:
        """A stage starts."""
        self._title, self._began = printable(title), time.monotonic()
        LOGGER.info("%s: %s", self._title, nbytes_text(nbytes) if nbytes else "started")
        if self._observer is not None:
            self._observer.begin(title=title, nbytes=nbytes)

    def advance(self, nbytes: int) -> None:
        """`nbytes` more bytes are done."""
        if self._observer is not None:
            self._observer.advance(nbytes)

    def end(self) -> None:
        """The stage is over."""
        LOGGER.info("%s: done in %s", self._title, seconds_text(time.monotonic() - self._began))
        if self._observer is not None:
            self._observer.end()


def log_report(report: Report, *, rank: int = 0) -> None:
    """Log the lists of a report, a record per item. Ranks other than 0 log warnings only."""
    for part in report.page():
        if isinstance(part, Section) and part.is_list:
            level = logging.WARNING if part.title in _ALARMING else logging.INFO
            if rank != 0 and level == logging.INFO:
                continue
            for (item,) in part.rows[:_MOST]:
                LOGGER.log(level, "%s: %s", part.title, printable(item))
            if len(part.rows) > _MOST:
                LOGGER.log(level, "%s: %s more", part.title, f"{len(part.rows) - _MOST:,}")
