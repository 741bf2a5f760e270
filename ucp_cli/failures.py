"""Expected failures as one message and an exit code, never as a traceback."""

from __future__ import annotations

import os
import signal
from typing import IO, Any

import click

from ucp.core.text.units import printable
from ucp.errors import MemoryBudgetError, UcpError, UsageError
from ucp_cli.stopping import Terminated

FAILED = 1
"""The command failed, and the message says why and what to do; or `verify` found damage."""

USAGE = 2
"""An argument is invalid, or does not apply to this source or target."""

DIFFERENT = 3
"""Done, and differences were found."""

INTERRUPTED = 130
"""Stopped from the keyboard."""

HUNG_UP = 129
"""Stopped by SIGHUP (128 + 1), which a closing terminal sends."""

TERMINATED = 143
"""Stopped by SIGTERM (128 + 15), which a scheduler sends before it kills."""


class Failure(click.ClickException):
    """An expected failure of a command: its message and exit code."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # a class attribute in click's hints, but read of the instance

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message to `file`, by default to stderr."""
        head = click.style("Error:", fg=None if os.environ.get("NO_COLOR") else "red", bold=True)
        click.echo(f"{head} {printable(self.message)}", file=file, err=file is None)


def make_stopped(by: KeyboardInterrupt, advice: str = "") -> Failure:
    """The failure for an interrupt from the keyboard or by a signal. `advice`: text after the message."""
    if isinstance(by, Terminated):
        return Failure(f"terminated{advice}", HUNG_UP if by.args == (signal.SIGHUP,) else TERMINATED)
    return Failure(f"interrupted{advice}", INTERRUPTED)


def to_failure(error: BaseException) -> Failure | None:
    """`error` as a failure to show to the user; None for a bug of this program, which gets a traceback."""
    match error:
        case UsageError() | MemoryBudgetError():
            return Failure(str(error), USAGE)
        case UcpError():
            return Failure(str(error))
        case KeyboardInterrupt():
            return make_stopped(error)
        case OSError(strerror=str(reason)):
            return Failure(f"{error.filename}: {reason}" if error.filename else reason)
    return None
