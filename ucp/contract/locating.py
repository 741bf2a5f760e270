"""Finds the checkpoint that a path means, in the same way for every format.

1. The path is a checkpoint.
2. A pointer file in the folder, such as `latest`, names a checkpoint in it.
3. The folder contains one checkpoint. If there are several and no pointer names one, the user has to choose.

A format says what a path itself is (`Look`), and which files point (`Pointer`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Generic, TypeVar

from ucp.errors import MalformedError, UnknownFormatError, UsageError, format_count, format_list
from ucp.io.folder import exists, names_in, path_of, read_short_text, to_absolute

T = TypeVar("T")

_MOST_BYTES = 1024
_MOST_NAME = 255
"""Bytes that a file system allows in a name."""
_SHOWN = 3


class Strength(IntEnum):
    """Strength of evidence: if several formats recognise a path, the one with the strongest evidence reads it."""

    SUFFIX = 0
    """Files that only end like those of the format: any script may have put them beside another checkpoint."""
    WEIGHTS = 1
    """Weights, which frameworks also save beside their checkpoints."""
    MARKER = 2
    """Files that only checkpoints of the format have."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a format recognises a path."""

    root: Path
    """The directory or file that the format would read: what `latest`, a tag or a parent folder resolves to."""
    reasons: tuple[str, ...]
    """What was seen, e.g. "zero_pp_rank_*_optim_states.pt"."""
    is_saved_in: bool = False
    """Whether a run saved `root` in the folder passed; other subfolders there are then not examined."""
    strength: Strength = Strength.MARKER
    """Strength of the evidence."""
    not_read: tuple[str, ...] = ()
    """Files there that could be checkpoints too, by their suffix; set if this evidence is stronger."""


@dataclass(frozen=True, slots=True)
class SaveFolder:
    """A folder that checkpoints were saved in."""

    path: Path
    """The folder."""
    newest: str = ""
    """Name of the checkpoint saved last if it is not the one read: sidecar files belong to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located(Generic[T]):
    """What a path resolves to."""

    root: Path
    """Folder or file of the checkpoint; the path passed, if there are several checkpoints."""
    content: T
    """What the format found there."""
    reasons: tuple[str, ...]
    """Files and pointers that led to it."""
    choices: tuple[str, ...] = ()
    """Names in `root` that the user has to choose from; empty if the checkpoint was found."""
    dangling: str = ""
    """Pointer file that names none of the choices; empty if there is none."""
    saved_in: SaveFolder | None = None
    """Folder that the checkpoint was saved in; None if that is not known."""
    strength: Strength = Strength.MARKER
    """Strength of the evidence."""
    notes: tuple[str, ...] = ()
    """What was assumed when it was located."""

    @property
    def evidence(self) -> Evidence:
        """The same, for `Format.detect`."""
        return Evidence(self.root, self.reasons, is_saved_in=self.saved_in is not None, strength=self.strength)


Look = Callable[[Path], Located[T] | None]
"""Recognises a path by itself, without following pointers; None if it is not a checkpoint of the format."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """A text file that names a checkpoint beside it."""

    file: str
    """Name of the file."""
    folder_of: Callable[[str], str | None] = str
    """Makes the name of the checkpoint's folder from the text of the file; None for a text that is not a name."""
    is_binding: bool = True
    """Whether a text that is not a name is an error even if the folder has only one checkpoint."""

    def read(self, folder: Path) -> str | None:
        """The name that the file in `folder` gives; None if there is no such file, or no valid name in it."""
        text = read_short_text(folder / self.file, most_bytes=_MOST_BYTES)
        name = self.folder_of(text) if text else None
        if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
            return None
        return name if all(len(os.fsencode(part)) <= _MOST_NAME for part in Path(name).parts) else None


def locate(path: Path, look: Look[T], pointers: Sequence[Pointer] = ()) -> Located[T] | None:
    """The checkpoint that `path` is or leads to; None if there is none."""
    return look_at(path, look, pointers) or follow_pointers(path, look, pointers) or find_only(path, (look,), pointers)


def look_at(path: Path, look: Look[T], pointers: Sequence[Pointer]) -> Located[T] | None:
    """The checkpoint that `path` itself is, with the folder that it was saved in, as pointers there show."""
    located = look(path)
    if located is None:
        return None
    root = path_of(to_absolute(located.root))
    folder = root.parent
    names = (name for pointer in pointers if (name := pointer.read(folder)) and (folder / name).is_dir())
    newest = next(names, None)
    if newest is None:
        return located
    return replace(located, saved_in=SaveFolder(folder, newest="" if folder / newest == root else newest))


def follow_pointers(path: Path, look: Look[T], pointers: Sequence[Pointer]) -> Located[T] | None:
    """Follow the pointers in `path`, in order, to the first checkpoint."""
    for pointer in pointers:
        name = pointer.read(path)
        located = look(path / name) if name else None
        if located is not None:
            reasons = (f"{pointer.file} -> {name}", *located.reasons)
            return replace(located, reasons=reasons, saved_in=SaveFolder(path))
    return None


def find_only(path: Path, looks: Sequence[Look[T]], pointers: Sequence[Pointer] = ()) -> Located[T] | None:
    """The only checkpoint in `path`, or the choice between several, by the first of `looks` that recognises any.

    `pointers`: pointer files; if one is there, it is known to lead to no checkpoint.
    """
    names = sorted(name for name in names_in(path) if (path / name).is_dir())
    for look in looks:
        below = {name: located for name in names if (located := look(path / name)) is not None}
        if not below:
            continue
        lost = (p.file for p in pointers if exists(path / p.file) and (p.is_binding or p.read(path)))
        dangling = next(lost, "")
        name, located = next(iter(below.items()))
        if len(below) == 1 and not dangling:
            reasons = (f"the only checkpoint, {name}", *located.reasons)
            return replace(located, reasons=reasons, saved_in=SaveFolder(path) if pointers else None)
        reasons = (f"folders {', '.join([*below][:_SHOWN])}{', ...' if len(below) > _SHOWN else ''}",)
        return replace(located, root=path, reasons=reasons, choices=tuple(below), dangling=dangling)
    return None


def require_checkpoint(
    located: Located[T] | None, path: Path, what: str, example: str, pointer: str = ""
) -> Located[T]:
    """The one checkpoint found at `path`. Raises UnknownFormatError, MalformedError (a pointer to none), UsageError.

    `what`, `example`: what the message says is expected. `pointer`: the file that would name one of several.
    """
    if located is None:
        raise UnknownFormatError(f"expected {what} at {path}: {example}")
    choices = format_list(str(located.root / name) for name in located.choices)
    if located.dangling:
        text = read_short_text(located.root / located.dangling, most_bytes=_MOST_BYTES)
        shown = "what cannot be read as text" if text is None else f"{text!r}, which names none"
        raise MalformedError(
            f"expected {located.root / located.dangling} to name a checkpoint beside it; got {shown}. Copy the missing "
            f"folder, or pass one that is there:\n{choices}"
        )
    if located.choices:
        noun = "candidate file" if located.strength is Strength.SUFFIX else "checkpoint"
        unnamed = f" and no {pointer} that names one" if pointer else ""
        raise UsageError(
            f"{path} holds {format_count(len(located.choices), noun)}{unnamed}; pass one of them:\n{choices}"
        )
    return located
