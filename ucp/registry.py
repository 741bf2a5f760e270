"""Formats, targets and engines, found by entry point: built-ins use the same door as third parties.

Groups: `ucp.formats`, `ucp.targets`, `ucp.engines`. The name of the entry point is the name users type.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

from ucp.errors import UcpError, UnknownFormatError, UsageError
from ucp.io.commit import refuse_partial
from ucp.protocols import Engine, Evidence, Format, Target

__all__ = ["engine", "names", "recognise", "target"]

_MOST_TRIED = 50
"""Folders looked into for a checkpoint that may have been meant."""


@cache
def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


@cache
def _made(group: str, name: str) -> object:
    points = _found(group)
    if name not in points:
        known = ", ".join(sorted(points)) or "none: is universal-checkpoint installed?"
        near = get_close_matches(name, points, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"expected one of the {group.removeprefix('ucp.')} {known}; got {name!r}{hint}")
    return points[name].load()()


def names(group: str) -> tuple[str, ...]:
    """Names registered in `ucp.formats`, `ucp.targets` or `ucp.engines`."""
    return tuple(sorted(_found(group)))


def target(name: str) -> Target:
    """The target of that name. Raises UsageError naming those there are."""
    return cast("Target", _made("ucp.targets", name))  # what the group promises


def engine(name: str) -> Engine:
    """The engine of that name. Raises UsageError naming those there are."""
    return cast("Engine", _made("ucp.engines", name))  # what the group promises


def recognise(path: Path, *, unfinished: bool = False) -> tuple[Format, Evidence]:
    """The one format that `path` is of; `unfinished`: even when it is the growing part of a conversion.

    Raises UnknownFormatError when none or several recognise it, IncompleteError for an unfinished conversion.
    """
    if not path.exists():
        raise UnknownFormatError(f"expected a checkpoint at {path}; nothing is there. Check the path")
    if not unfinished:
        refuse_partial(path.resolve())
    formats = [cast("Format", _made("ucp.formats", name)) for name in names("ucp.formats")]
    found = [(fmt, evidence) for fmt in formats if (evidence := fmt.detect(path)) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        claims = "; ".join(f"{fmt.name} because of {', '.join(evidence.reasons)}" for fmt, evidence in found)
        raise UnknownFormatError(f"{path} could be several formats ({claims}); pass the folder of one of them")
    raise UnknownFormatError(
        f"expected a checkpoint of {', '.join(names('ucp.formats'))}; {path} is none of them ({_contents(path)}). "
        f"Pass the folder that the framework saved to{_nearby(path, formats)}"
    )


def _nearby(path: Path, formats: Sequence[Format]) -> str:
    """A checkpoint one level up or down, if there is one."""
    below = sorted(entry for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []
    for candidate in (*below[:_MOST_TRIED], path.parent):
        if any(fmt.detect(candidate) is not None for fmt in formats):
            return f"; did you mean {candidate}?"
    return ""


def _contents(path: Path) -> str:
    if not path.is_dir():
        return f"a file of {path.stat().st_size} bytes"
    try:
        entries = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise UcpError(f"cannot read {path}: {error.strerror}") from error
    shown = ", ".join(entries[:5]) or "nothing"
    return f"it holds {shown}{', ...' if len(entries) > 5 else ''}"
