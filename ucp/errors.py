"""Every error that `ucp` raises on purpose.

A message says what was expected, what was found, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "AccessError",
    "BusyError",
    "ChangedError",
    "ConnectionLostError",
    "CorruptError",
    "CoverError",
    "DestinationError",
    "EngineError",
    "FamilyError",
    "IdleOptionError",
    "IncompleteError",
    "LoadError",
    "MalformedError",
    "MemoryBudgetError",
    "MisfitError",
    "MissingFileError",
    "MissingLibraryError",
    "MissingStateError",
    "NoSuchNameError",
    "OverlapError",
    "ReplicaError",
    "SourceError",
    "StaleError",
    "TagError",
    "TopologyError",
    "UcpError",
    "UnfinishedError",
    "UnknownFamilyError",
    "UnknownFormatError",
    "UnsupportedError",
    "UsageError",
    "WorkerDiedError",
    "format_count",
    "format_list",
    "nearest",
]


def _printable(part: object) -> object:
    """A message with lone surrogates escaped: a name in a checkpoint may have them, and no terminal can show them."""
    return part.encode("utf-8", "backslashreplace").decode() if isinstance(part, str) else part


class UcpError(Exception):
    """Root of every expected failure; the command line prints it without a traceback.

    Messages name options as the command line spells them; public functions add a note with their arguments.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*map(_printable, args))


class UsageError(UcpError):
    """An argument cannot mean anything: exit code 2."""


class TopologyError(UsageError):
    """A layout of ranks that nothing can have, or that this target cannot have of this source; another one can."""


class IdleOptionError(UsageError):
    """What is said of a source (a model family) is of no use to its reader."""


class NoSuchNameError(UcpError, KeyError):
    """A checkpoint has no parameter or state of that name; the message says which are near."""

    def __str__(self) -> str:
        """The message as it is: a KeyError shows its argument quoted."""
        return str(self.args[0])


class MissingLibraryError(UcpError, ImportError):
    """A library that only some calls need is not installed; the message says what installs it."""


class SourceError(UcpError):
    """The source cannot be read as it stands."""


class UnknownFormatError(SourceError):
    """No format recognises the path."""


class UnsupportedError(SourceError):
    """The layout is recognised and named, but not convertible."""


class MissingFileError(SourceError):
    """Files that the layout needs are not there; the message lists all of them."""


class MalformedError(SourceError):
    """Files are there but truncated, from different runs, or inconsistent."""


class ChangedError(SourceError):
    """A referenced file is no longer the one that was recorded."""


class AccessError(SourceError):
    """A store does not let us in: there are no credentials, or they do not allow it."""


class ConnectionLostError(SourceError):
    """A store does not answer, or breaks off, however often it is asked."""


class FamilyError(SourceError):
    """Names or shapes of the source and the rules of a model family do not fit together."""


class UnknownFamilyError(FamilyError):
    """No model family fits, or several do."""


class MisfitError(UsageError, UnsupportedError, FamilyError):
    """The model family or the target that the user named does not fit the model; another one may."""


class StaleError(SourceError):
    """Parts of a chain of checkpoints are older than the user allows."""


class IncompleteError(SourceError):
    """The path is an unfinished conversion."""


class CoverError(UcpError):
    """Regions leave a hole in a tensor, or overlap without a declared rule."""


class CorruptError(UcpError):
    """Stored bytes differ from their recorded checksum."""


class ReplicaError(UcpError):
    """Copies that must be equal bit for bit are not."""


class MissingStateError(UcpError):
    """The target needs something the source does not hold."""


class MemoryBudgetError(UcpError):
    """The work needs more memory than the stated budget."""


class DestinationError(UcpError):
    """The destination cannot be written as asked."""


class BusyError(DestinationError):
    """Another conversion, or parts of this one, write the destination now."""


class UnfinishedError(DestinationError):
    """Parts of the conversion are still to be done; the message says which, and how."""


class OverlapError(UsageError, DestinationError):
    """The destination is the source, lies in it, or holds what it consists of: another one must be named."""


class TagError(UsageError, DestinationError):
    """The tag that the user chose can be no folder of the destination."""


class WorkerDiedError(UcpError):
    """A worker process ended before its work was done (killed, or out of memory)."""


class EngineError(UcpError):
    """The machines that an engine works on cannot be reached, or are not as it needs them."""


class LoadError(UcpError):
    """A live model or optimizer and the checkpoint do not fit together."""


def format_list(items: Iterable[str], *, most: int = 20) -> str:
    """One indented line per item, the rest counted.

    >>> print(format_list(["a", "b", "c"], most=2))
      a
      b
      (+1 more)
    """
    lines = [f"  {item}" for item in items]
    if len(lines) > most:
        lines = [*lines[:most], f"  (+{len(lines) - most} more)"]
    return "\n".join(lines)


def format_count(count: int, what: str, several: str = "") -> str:
    """A number of things; `what`: the word for one of them, and what follows; `several`: the same for more.

    >>> format_count(1, "state of parameters"), format_count(2000, "file"), format_count(2, "name has", "names have")
    ('1 state of parameters', '2,000 files', '2 names have')
    """
    if several:
        return f"{count:,} {what if count == 1 else several}"
    word, space, rest = what.partition(" ")
    return f"{count:,} {word}{'' if count == 1 else 's'}{space}{rest}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that was likely meant: of which `name` leaves out words or letters, or that is spelt alike.

    >>> nearest("num_heads", ["mamba_num_heads", "num_attention_heads"]), nearest("hf", ["dcp", "huggingface"])
    ('num_attention_heads', 'huggingface')
    >>> nearest("num_layer", ["num_layers"]), nearest("lama", ["gpt", "llama"]), nearest("nope", ["llama"])
    ('num_layers', 'llama', None)
    """
    names = list(known)
    first, *rest = name.split("_")
    shortened = [
        candidate
        for candidate in names
        if candidate.split("_")[0] == first and _leaves_out(rest, candidate.split("_")[1:])
    ]
    near = get_close_matches(name, names, 1)
    initials = [
        candidate
        for candidate in names
        if len(name) in (2, 3) and candidate[:1] == name[0] and _leaves_out(name, candidate)
    ]
    return next(iter((shortened if rest else []) + near + initials), None)


def _leaves_out(parts: Iterable[str], all_parts: Iterable[str]) -> bool:
    """Whether `parts` are `all_parts` in their order, with others between."""
    remaining = iter(all_parts)
    return all(part in remaining for part in parts)
