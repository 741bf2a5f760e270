"""Which folder holds the checkpoint, and what lies in it; from names alone.

A user may pass the save folder (with its `latest`), a tag folder, or the `checkpoint-N/` of a Hugging Face Trainer,
which is a save folder too. Other files of the save folder (`ucp.contract.companion_files`) belong to the tag that
`latest` names, or to the only one. A tag folder is native when it has files of the grammar
(`ucp_formats.deepspeed.names`), and universal when it has a folder `zero/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ucp.contract.companion_files import SaveFolder, with_companions
from ucp.contract.output_names import is_text
from ucp.core.index import TAG, Extra, Index
from ucp.errors import MalformedError, SourceError, UnknownFormatError, UsageError, counted, listed
from ucp.io.folder import absolute, is_there, names_in, names_of_folder, path_of, short_text
from ucp_formats.deepspeed.names import LATEST, LATEST_UNIVERSAL, UNIVERSAL, FileName, Role, parse_name

__all__ = ["Located", "TagFolder", "list_folder", "locate_native", "locate_universal", "saved_as", "the_folder"]

_MOST_TAG_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What a path resolves to."""

    root: Path
    """The tag folder; the folder passed, when there is a problem."""
    reasons: tuple[str, ...]
    """What was seen on the way."""
    tags: tuple[str, ...] = ()
    """Tags to choose from, when nothing says which; else empty."""
    dangling: str = ""
    """File that is there to name the tag, and names none that is; else empty."""
    saved_in: SaveFolder | None = None
    """Folder that the tag folder was saved in; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFolder:
    """Entries of a tag folder."""

    path: Path
    """The folder, absolute."""
    files: tuple[FileName, ...]
    """Files of the grammar, by name; a split file once."""
    entries: frozenset[str]
    """Names of everything in it."""
    strays: tuple[str, ...]
    """Names that are not part of the grammar, sorted."""


def locate_native(path: Path) -> Located | None:
    """Where the native checkpoint at `path` lies, or None if there is none."""
    if not path.is_dir():
        return None
    if _is_native(path):
        return Located(root=path, reasons=(_sample(path),), saved_in=_parent(path, (LATEST,)))
    pointed = _follow(path, LATEST)
    if pointed is not None:
        return _pointed(path, LATEST, pointed) if _is_native(pointed) else None
    universal = _follow(path, LATEST_UNIVERSAL)
    if universal is not None and _is_universal(universal):
        return None
    return _only_tag(path, _is_native)


def locate_universal(path: Path) -> Located | None:
    """Where the universal checkpoint at `path` lies, or None if there is none or `latest` names a native one."""
    if not path.is_dir():
        return None
    if _is_universal(path):
        reasons = (f"folder {UNIVERSAL}/ of parameters",)
        return Located(root=path, reasons=reasons, saved_in=_parent(path, (LATEST_UNIVERSAL, LATEST)))
    latest = _follow(path, LATEST)
    if latest is not None and _is_native(latest):
        return None
    for pointer in (LATEST_UNIVERSAL, LATEST):
        pointed = _follow(path, pointer)
        if pointed is not None and _is_universal(pointed):
            return _pointed(path, pointer, pointed)
    return None if _only_tag(path, _is_native) else _only_tag(path, _is_universal)


def the_folder(located: Located | None, path: Path) -> Located:
    """The tag folder found. Raises UnknownFormatError when there is none, UsageError when there are several."""
    if located is None:
        raise UnknownFormatError(
            f"expected a DeepSpeed checkpoint at {path}: a folder with {LATEST!r}, or a tag folder such as "
            "global_step100 with files like mp_rank_00_model_states.pt"
        )
    if located.dangling:
        raise MalformedError(
            f"expected {path / located.dangling} to name a tag folder beside it; it names none. Copy the missing "
            f"folder, or pass one that is there:\n{listed(str(path / tag) for tag in located.tags)}"
        )
    if located.tags:
        raise UsageError(
            f"{path} holds {counted(len(located.tags), 'checkpoint')} "
            f"and no file {LATEST!r} that names one; pass one of them:\n"
            f"{listed(str(path / tag) for tag in located.tags)}"
        )
    return located


def saved_as(index: Index, located: Located) -> Index:
    """`index` of the tag folder found, with its tag and with what lies beside it as extras."""
    root = path_of(absolute(located.root))
    folder = root.parent if located.saved_in is None else path_of(absolute(located.saved_in.path))
    name = root.relative_to(folder)
    named = (*index.extras, Extra(name=TAG, value=str(name))) if is_text(str(name)) else index.extras

    def is_own(path: Path) -> bool:
        return path.name in (LATEST, LATEST_UNIVERSAL, *name.parts[:1]) or _is_native(path) or _is_universal(path)

    return with_companions(replace(index, extras=named), located.saved_in, is_own=is_own)


def list_folder(path: Path) -> TagFolder:
    """What lies in a tag folder. Raises SourceError when it cannot be listed."""
    try:
        entries = sorted(names_of_folder(path))
    except OSError as error:
        raise SourceError(f"cannot list {path}: {error.strerror}") from error
    parsed = {entry: parse_name(entry) for entry in entries}
    files = {found.name: found for found in parsed.values() if found is not None}
    strays = tuple(entry for entry, found in parsed.items() if found is None)
    ordered = sorted(files.values(), key=lambda file: (file.role.name, file.mp, file.dp, file.name))
    return TagFolder(path=path.absolute(), files=tuple(ordered), entries=frozenset(entries), strays=strays)


def _is_native(path: Path) -> bool:
    return any(parse_name(name) for name in names_in(path)) and not _is_universal(path)


def _is_universal(path: Path) -> bool:
    """Whether it has `zero/` with a folder of `fp32.pt` in it."""
    zero = path / UNIVERSAL
    if not zero.is_dir():
        return False
    return any(name == "optimizer_state.pt" or (zero / name / "fp32.pt").is_file() for name in names_in(zero))


def _sample(path: Path) -> str:
    """One file name for each role, as evidence."""
    found: dict[Role, str] = {}
    for name in sorted(names_in(path)):
        parsed = parse_name(name)
        if parsed is not None:
            found.setdefault(parsed.role, parsed.name)
    return ", ".join(found.values())


def _follow(path: Path, pointer: str) -> Path | None:
    """The folder that the text file `pointer` names, if both are there."""
    tag = short_text(path / pointer, most_bytes=_MOST_TAG_BYTES)
    if not tag or os.path.isabs(tag) or ".." in Path(tag).parts:
        return None
    folder = path / tag
    return folder if folder.is_dir() else None


def _parent(path: Path, pointers: Sequence[str]) -> SaveFolder | None:
    """The folder that a tag folder lies in, if one of `pointers` there says that checkpoints were saved in it."""
    root = path_of(absolute(path))
    named = next(filter(None, (_follow(root.parent, pointer) for pointer in pointers)), None)
    if named is None:
        return None
    return SaveFolder(root.parent, newest="" if named == root else str(named.relative_to(root.parent)))


def _pointed(path: Path, pointer: str, folder: Path) -> Located:
    reasons = (f"{pointer} -> {folder.relative_to(path)}", _sample(folder))
    return Located(root=folder, reasons=reasons, saved_in=SaveFolder(path))


def _only_tag(path: Path, is_tag: Callable[[Path], bool]) -> Located | None:
    tags = sorted(name for name in names_in(path) if (path / name).is_dir() and is_tag(path / name))
    if not tags:
        return None
    for pointer in (LATEST, LATEST_UNIVERSAL):
        if is_there(path / pointer) and _follow(path, pointer) is None:
            return Located(
                root=path, reasons=(f"tag folders {', '.join(tags[:3])}",), tags=tuple(tags), dangling=pointer
            )
    if len(tags) == 1:
        reasons = (f"the only tag folder, {tags[0]}", _sample(path / tags[0]))
        return Located(root=path / tags[0], reasons=reasons, saved_in=SaveFolder(path))
    return Located(root=path, reasons=(f"tag folders {', '.join(tags[:3])}, ...",), tags=tuple(tags))
