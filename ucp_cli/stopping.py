"""SIGTERM and SIGHUP end a verb as Ctrl-C does: work in progress is left in order, and one line says how to go on.

A scheduler sends the one before it kills, a terminal that goes away the other. Only the first signal counts: those that
follow would cut the tidying short.
"""

from __future__ import annotations

import signal
from types import FrameType

_HEEDED = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """A signal that ends the program was received; its number is the argument."""


def heed_termination() -> None:
    """From now on they raise `Terminated` in the main thread; not those that the process was told to ignore."""
    for number in _HEEDED:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in _HEEDED:
        signal.signal(other, signal.SIG_IGN)
    raise Terminated(number)
