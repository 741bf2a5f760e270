"""An option: how the command line and functions spell it, what it takes, and what it decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ucp.conversion.values import dtypes_of, settings_of, switch_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is known of an option: how it is spelled, what it takes, and what it decides."""

    name: str = ""
    """The argument of functions; set by `ucp.conversion.options.OPTIONS`."""
    flag: str = ""
    """The option of the command line; set there where it is the name with dashes."""
    also: str = ""
    """Another spelling of the flag."""
    metavar: str | None = None
    """The value on a help page; None for a flag without value, or one of `choices`."""
    help: str
    """What it does."""
    python: str = ""
    """The same for the arguments of functions, where these take other forms."""
    comparing: str = ""
    """The same for `verify` and `diff`, where it means something else there."""
    parse: Callable[[Any], object] = bool
    """Makes the field's value of the argument, or raises UsageError."""
    choices: type[StrEnum] | None = None
    """Values there are, where these are few."""
    repeats: bool = False
    """Whether the command line takes it several times."""
    shown: str = ""
    """The default on a help page."""
    identity: str = ""
    """What messages call it as a part of a conversion's identity; empty where it does not decide what is written."""
    default: object = None
    """The argument's default; set there."""

    def value_of(self, argument: object) -> object:
        """The field's value. Raises UsageError for an argument that is none."""
        return (switch_of(self.name) if isinstance(self.default, bool) else self.parse)(argument)

    @property
    def in_python(self) -> str:
        """The argument as a note below a message spells it.

        >>> Option(name="fsync", help="", default=True).in_python
        'fsync=False'
        """
        is_map = self.parse in {dtypes_of, settings_of}
        value = not self.default if isinstance(self.default, bool) else "{...}" if is_map else "..."
        return f"{self.name}={value}"


def option(text: str, /, *, default: Any = None, **more: Any) -> Any:
    """A field of that default, with its `Option` as metadata; the type of the field is that of the checked value."""
    means: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return field(**means, metadata={"option": Option(help=text, **more)})
