"""Checks files that are named after parameters: one error lists all names that make no valid path.

>>> check_named([("a/b", "zero/a/b/fp32.pt")], expected="names that can be folders", remedy="rename them")
>>> check_named([("..", "zero/../fp32.pt")], expected="names that can be folders", remedy="rename them")
Traceback (most recent call last):
ucp.errors.DestinationError: expected names that can be folders; got 1 that cannot:
  '..': its part '..' cannot be the name of a folder
rename them
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from ucp.errors import DestinationError, format_count, format_list

_MOST_COMPONENT = 255
"""Longest part of a path on POSIX file systems, in bytes (NAME_MAX of Linux)."""
_MOST_PATH = 4095
"""Longest path on Linux, in bytes (PATH_MAX, which also counts the NUL at its end)."""
_NO_LIMIT = 1 << 31
"""Limit where a file system has none: no path is that long."""
_SHOWN = 80
"""Characters of a name that a message shows."""


def check_named(
    paths: Iterable[tuple[str, str]],
    *,
    expected: str,
    remedy: str,
    reserved: Iterable[str] = (),
    faults: Iterable[tuple[str, str]] = (),
    error: type[DestinationError] = DestinationError,
) -> None:
    """Raise `error` for names whose path cannot be a file, or collides with another.

    `paths`: each name, and the path relative to the destination that is made from it. `reserved`: paths of other files.
    `faults`: names, and what else is wrong with them. `expected`, `remedy`: parts of the message.
    """
    named = list(paths)
    faults_by_name: dict[str, str] = {}
    for name, path in named:
        fault = _fault(path)
        if fault:
            faults_by_name.setdefault(name, fault)
    for name, fault in (*faults, *_meeting([item for item in named if item[0] not in faults_by_name], reserved)):
        faults_by_name.setdefault(name, fault)
    if faults_by_name:
        lines = format_list(f"{_format_name(name)}: {fault}" for name, fault in faults_by_name.items())
        raise error(f"expected {expected}; got {len(faults_by_name):,} that cannot:\n{lines}\n{remedy}")


def check_fits(folder: Path, paths: Iterable[str]) -> None:
    """Raise DestinationError for files whose path below `folder` is too long for the file system there."""
    parent = folder
    while not os.path.exists(parent):  # also False for a name that is too long
        parent = parent.parent
    most_component, most_path = _limit(parent, "PC_NAME_MAX"), _limit(parent, "PC_PATH_MAX") - 1
    lengths_of_new = [len(os.fsencode(part)) for part in folder.parts[len(parent.parts) :]]
    if max(lengths_of_new, default=0) > most_component:
        raise DestinationError(
            f"expected a destination whose name takes at most {most_component} bytes, with the ending of its working "
            f"folder; got {max(lengths_of_new)} bytes in {_format_name(str(folder))}. Choose a shorter name"
        )
    room = most_path - len(os.fsencode(folder)) - 1
    lengths = ((path, len(os.fsencode(path)), _longest(path)) for path in paths)
    long = [path for path, nbytes, component in lengths if nbytes > room or component > most_component]
    if long:
        raise DestinationError(
            f"expected paths of at most {most_path} bytes, and {most_component} for each part, below {folder}; got "
            f"{format_count(len(long), 'longer one')}:\n{format_list(map(_format_name, long))}\nchoose a shorter "
            "destination, or a layout or target that names no file after a parameter"
        )


def is_text(name: str) -> bool:
    """Whether `name` can be written as UTF-8: lone surrogates, which pickles may hold, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def check_text(names: Iterable[str]) -> None:
    """Raise DestinationError for names that are not valid Unicode, which JSON headers cannot store.

    JSON could escape a lone surrogate; but readers of safetensors refuse it, and two in a row come back as one.
    """
    wrong = [name for name in dict.fromkeys(names) if not is_text(name)]
    if wrong:
        raise DestinationError(
            f"expected names that are text; got {format_count(len(wrong), 'name')} with lone surrogates, which UTF-8 "
            f"cannot store:\n{format_list(map(repr, wrong))}\nrename them in the model, or leave them out with "
            "--exclude"
        )


def _fault(path: str) -> str:
    """Why `path` cannot be a file below the destination; empty if it can."""
    if "\0" in path:
        return "it holds a NUL character, which ends a path"
    if not is_text(path):
        return "it holds lone surrogates, which UTF-8 cannot store"
    wrong = [part for part in path.split("/") if part in ("", ".", "..")]
    if wrong:
        return f"its part {wrong[0]!r} cannot be the name of a folder"
    if _longest(path) > _MOST_COMPONENT:
        return f"a part of its path takes {_longest(path):,} bytes; a file system allows {_MOST_COMPONENT}"
    nbytes = len(path.encode())
    return f"its path takes {nbytes:,} bytes; a system allows {_MOST_PATH:,}" if nbytes > _MOST_PATH else ""


def _meeting(named: Iterable[tuple[str, str]], reserved: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names with the same path as another name, or with a path below the file of another."""
    owners = dict.fromkeys(reserved, "the checkpoint itself")
    for name, path in named:
        if path in owners:
            yield name, f"{path} would be a file of {owners[path]} too"
        owners.setdefault(path, _format_name(name))
    for name, path in named:
        for folder in PurePosixPath(path).parents:
            owner = owners.get(str(folder))
            if owner is not None:
                yield name, f"{folder} would be a folder of it and a file of {owner}"


def _longest(path: str) -> int:
    """Bytes of the longest part of a path."""
    return max(len(os.fsencode(part)) for part in path.split("/"))


def _limit(folder: Path, name: str) -> int:
    """A limit of the file system at `folder`; `_NO_LIMIT` if it has none."""
    try:
        limit = os.pathconf(folder, name)
    except (OSError, ValueError):
        return _NO_LIMIT
    return limit if limit > 0 else _NO_LIMIT


def shorter(name: str) -> str:
    """A name as messages show it: a long one is cut."""
    return name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."


def _format_name(name: str) -> str:
    return repr(shorter(name))
