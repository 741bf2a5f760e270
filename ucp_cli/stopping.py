"""SIGTERM and SIGHUP end a verb as Ctrl-C does: unfinished work can be continued, and one line says how.

A scheduler sends SIGTERM before it kills; a closing terminal sends SIGHUP. Only the first signal counts: later ones
would interrupt the cleanup.
"""

from __future__ import annotations

import signal
from types import FrameType

_HEEDED = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """A signal that ends the program was received. The argument is its number."""


def heed_termination() -> None:
    """Let SIGTERM and SIGHUP raise `Terminated` in the main thread, unless this process ignores them (nohup)."""
    for number in _HEEDED:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in _HEEDED:
        signal.signal(other, signal.SIG_IGN)
    raise Terminated(number)
