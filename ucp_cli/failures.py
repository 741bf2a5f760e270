"""Expected failures as one message and an exit code, never as a traceback."""

from __future__ import annotations

from typing import IO, Any

import click

from ucp.errors import UcpError, UsageError
from ucp_cli.exits import FAILED, INTERRUPTED, USAGE
from ucp_cli.units import printable

__all__ = ["Failure", "explained"]


class Failure(click.ClickException):
    """A message for the user, and the exit code that goes with it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message, to stderr unless told otherwise."""
        click.echo(f"{click.style('Error:', fg='red', bold=True)} {printable(self.message)}", file=file, err=file is None)


def explained(error: BaseException) -> Failure | None:
    """The failure that `error` is to a user; None for a mistake of this program."""
    match error:
        case UsageError():
            return Failure(str(error), USAGE)
        case UcpError():
            return Failure(str(error), FAILED)
        case KeyboardInterrupt():
            return Failure("interrupted", INTERRUPTED)
        case OSError(strerror=str(reason)):
            return Failure(f"{error.filename}: {reason}" if error.filename else reason, FAILED)
    return None
