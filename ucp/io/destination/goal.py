"""What may lie at a destination, and which conversion, of which process, goes there: nothing else is replaced."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ucp.errors import DestinationError, OverlapError, counted, listed
from ucp.io.destination.mark import read_mark
from ucp.io.folder import MARK, files_below, path_of, url_scheme


@dataclass(frozen=True, slots=True)
class Making:
    """Which conversion it is."""

    fingerprint: str
    """Equal for conversions that write the same bytes."""
    facts: Mapping[str, str]
    """What is made from what, and how, by name (source, target, topology, ...): what messages tell of it."""

    def differences(self, recorded: object) -> list[str]:
        """How the conversion whose facts were `recorded` is another: a line for each fact."""
        if not isinstance(recorded, dict) or not recorded:
            return []
        files = (
            "files of the source: not those that were read then, or changed since; or those of --rename, --patterns, "
            "--shapes-from or --set config"
        )
        return [
            f"{name}: {recorded.get(name) or 'by default'} then, {self.facts.get(name) or 'by default'} now"
            for name in dict.fromkeys((*self.facts, *recorded))
            if self.facts.get(name) != recorded.get(name)
        ] or [files]


def this_process() -> dict[str, str | int]:
    """Host and number of this process, for JSON."""
    return {"host": socket.gethostname(), "process": os.getpid()}


def describe_process(text: bytes) -> str:
    """The process that a JSON text names, for messages.

    >>> describe_process(b'{"host": "node7", "process": 1234}')
    'process 1234 on node7'
    >>> describe_process(b"")
    'a process that left no name'
    """
    try:
        noted = json.loads(text)
        return f"process {noted['process']} on {noted['host']}"
    except (ValueError, TypeError, KeyError):
        return "a process that left no name"


def check_destination(src: Path, dst: Path) -> None:
    """Raise OverlapError where writing `dst` could touch the source `src`, DestinationError where it cannot be."""
    check_distinct(src, dst)
    goal = dst.resolve()
    if os.path.ismount(goal):
        raise DestinationError(f"{dst} is a mount point: it cannot be put in place by a rename. Name a folder in it")
    if dst.exists() and not dst.is_dir():
        raise DestinationError(f"expected a folder, or nothing, at {dst}; a file is there")
    try:
        here = Path.cwd()
    except FileNotFoundError:  # removed by somebody
        here = Path("/")
    if goal == here or goal in here.parents:
        raise DestinationError(f"{dst} is, or holds, the current folder, which a rename would replace; go elsewhere")
    parent = goal.parent
    scheme = url_scheme(dst)
    if scheme:
        raise DestinationError(
            f"expected a folder, or the URL of a bucket such as s3://bucket/run; got {dst} of {scheme}://"
        )
    if not parent.is_dir():
        raise DestinationError(f"parent directory {parent} does not exist; create it first")


def check_distinct(src: Path, dst: Path) -> None:
    """Raise OverlapError where `dst` is the source `src`, or one lies in the other."""
    source, goal = src.resolve(), dst.resolve()
    if goal == source or source in goal.parents:
        raise OverlapError(f"the destination {dst} is the source {src} or lies inside it; choose another folder")
    if goal in source.parents:
        raise OverlapError(f"the source {src} lies inside the destination {dst}; choose another folder")


def check_apart(dst: Path, root: str, paths: Iterable[str]) -> None:
    """Raise OverlapError where `dst` would lie in the source, or take the place of what it consists of.

    `root`: what the source was resolved to (the tag folder that `latest` names, the store that a manifest is of);
    readers of it take what lies there for a part of it. Beside it, in the folder that it was saved to, there is room
    for others. `paths`: files that it refers to.
    """
    goal = dst.resolve()
    source = path_of(root).resolve()
    if source.is_dir() and source in goal.parents:
        raise OverlapError(
            f"the destination {dst} lies inside the source {source}, whose readers would take it for a part of it; "
            "choose a folder beside it"
        )
    inside = [path for path in paths if goal in path_of(path).resolve().parents]
    if inside:
        raise OverlapError(
            f"the source refers to {counted(len(inside), 'file')} in the destination {dst}, such as {inside[0]}; "
            "choose another folder"
        )


def check_goal(dst: Path, making: Making, *, resume: bool, overwrite: bool) -> None:
    """Raise DestinationError where what lies at `dst` is not to be replaced, or not by this conversion."""
    if not dst.exists() or not any(dst.iterdir()):
        return
    if not (dst / MARK).exists():
        raise DestinationError(
            f"{dst} is not empty, and was not written by ucp (it has no {MARK}); choose another folder, or "
            "remove it yourself"
        )
    if not overwrite and resume:
        raise DestinationError(
            f"{dst} is a finished conversion, made differently{_told(making.differences(read_mark(dst).made))}"
            "--resume continues what was begun from the same source with the same options. Choose another folder, "
            "or replace this one with --overwrite"
        )
    if not overwrite:
        raise DestinationError(f"{dst} is not empty; choose another folder, or pass --overwrite")
    check_foreign(dst, {str(file.relative_to(dst)) for file in files_below(dst)} - set(read_mark(dst).files))


def check_foreign(dst: Path | str, foreign: Collection[str]) -> None:
    """Raise DestinationError for files at `dst` that no conversion wrote or replaces, if there are any."""
    if foreign:
        raise DestinationError(
            f"{dst} holds {counted(len(foreign), 'file')} that ucp did not write there; move them away "
            f"first:\n{listed(sorted(foreign))}"
        )


def begun_otherwise(
    place: Path | str,
    making: Making,
    recorded: Mapping[str, Any],
    *,
    advice: str = "Start over with --overwrite, without --resume",
) -> DestinationError:
    """The error for an unfinished conversion at `place` that is another than the one that is asked for."""
    return DestinationError(
        f"{place} was begun from another source, another version of it, or with other options"
        f"{_told(making.differences(recorded.get('made')))}{advice}"
    )


def _told(lines: list[str]) -> str:
    """Lines between what goes before and the advice that follows."""
    return f":\n{listed(lines)}\n" if lines else ". "
