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

    Messages name options as the command line spells them; public functions add a note with the Python arguments.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*map(_printable, args))


class UsageError(UcpError):
    """An argument is invalid; the command line exits with code 2."""


class TopologyError(UsageError):
    """The topology is impossible, or this target cannot write it for this source; another one may work."""


class IdleOptionError(UsageError):
    """The source's format has no use for an option that describes the source, such as a model family."""


class NoSuchNameError(UcpError, KeyError):
    """A checkpoint has no parameter or state of that name; the message suggests similar names."""

    def __str__(self) -> str:
        """The message without quotes, which KeyError would add."""
        return str(self.args[0])


class MissingLibraryError(UcpError, ImportError):
    """A library that only some calls need is not installed; the message says what installs it."""


class SourceError(UcpError):
    """The source cannot be read."""


class UnknownFormatError(SourceError):
    """No format recognises the path."""


class UnsupportedError(SourceError):
    """The layout is recognised, but cannot be converted; the message names it."""


class MissingFileError(SourceError):
    """Files that the layout needs are not there; the message lists all of them."""


class MalformedError(SourceError):
    """Files are there but truncated, from different runs, or inconsistent."""


class ChangedError(SourceError):
    """A file that was recorded has been changed or replaced since."""


class AccessError(SourceError):
    """A storage service denies access: credentials are missing, or do not permit it."""


class ConnectionLostError(SourceError):
    """A storage service does not answer, or ends the connection, even after retries."""


class FamilyError(SourceError):
    """Names or shapes of the source contradict the rules of a model family."""


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
    """Parts of the conversion are not done; the message says which, and how to run them."""


class OverlapError(UsageError, DestinationError):
    """The destination is the source, is inside it, or contains files of it; another destination must be chosen."""


class TagError(UsageError, DestinationError):
    """The tag that the user chose cannot be the name of a folder in the destination."""


class WorkerDiedError(UcpError):
    """A worker process ended before its work was done (killed, or out of memory)."""


class EngineError(UcpError):
    """The machines that an engine runs on cannot be reached, or do not meet its requirements."""


class LoadError(UcpError):
    """A live model or optimizer and the checkpoint do not fit together."""


def format_list(items: Iterable[str], *, most: int = 20) -> str:
    """One indented line for each of the first `most` items, and a line that counts the others.

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
    """A number with its noun. `what`: the singular, and words that follow it; `several`: the plural, if irregular.

    >>> format_count(1, "state of parameters"), format_count(2000, "file"), format_count(2, "name has", "names have")
    ('1 state of parameters', '2,000 files', '2 names have')
    """
    if several:
        return f"{count:,} {what if count == 1 else several}"
    word, space, rest = what.partition(" ")
    return f"{count:,} {word}{'' if count == 1 else 's'}{space}{rest}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` that was probably meant: one that `name` abbreviates, or one that is spelt alike.

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
    """Whether `all_parts` contains `parts` in the same order, perhaps with others between them."""
    remaining = iter(all_parts)
    return all(part in remaining for part in parts)
