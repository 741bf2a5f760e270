"""SIGTERM ends a verb as Ctrl-C does: work in progress is left in order, and one line says how to go on.

A scheduler sends it before it kills. Only the first counts: those that follow would cut the tidying short.
"""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["Terminated", "heed_termination"]


class Terminated(KeyboardInterrupt):
    """SIGTERM was received."""


def heed_termination() -> None:
    """From now on SIGTERM raises `Terminated` in the main thread; not where the process was told to ignore it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
