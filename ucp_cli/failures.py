"""Expected failures as one message and an exit code, never as a traceback."""

from __future__ import annotations

from typing import IO, Any

import click

from ucp.errors import UcpError, UsageError
from ucp_cli.exits import FAILED, INTERRUPTED, USAGE
from ucp_cli.units import printable

__all__ = ["Failure", "Interrupted", "Misuse", "explained"]


class Failure(click.ClickException):
    """It could not be done."""

    exit_code = FAILED

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message, to stderr unless told otherwise."""
        head = click.style("Error:", fg="red", bold=True)
        click.echo(f"{head} {printable(self.message)}", file=file, err=file is None)


class Misuse(Failure):
    """It cannot mean anything."""

    exit_code = USAGE


class Interrupted(Failure):
    """It was stopped from the keyboard."""

    exit_code = INTERRUPTED


def explained(error: BaseException) -> Failure | None:
    """The failure that `error` is to a user; None for a mistake of this program."""
    match error:
        case UsageError():
            return Misuse(str(error))
        case UcpError():
            return Failure(str(error))
        case KeyboardInterrupt():
            return Interrupted("interrupted")
        case OSError(strerror=str(reason)):
            return Failure(f"{error.filename}: {reason}" if error.filename else reason)
    return None
