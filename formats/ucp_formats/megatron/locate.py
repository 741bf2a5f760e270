"""Which folder holds the checkpoint, and how it was saved; from names, the tracker and metadata.json alone.

A user may pass the save folder (with its tracker), an iteration folder, or the folder of one rank. What an iteration
folder is, is decided in Megatron's own order (checkpointing.py: _get_checkpoint_format): metadata.json, then folders of
ranks, then the .metadata of torch.distributed.checkpoint.

metadata.json says what backend of megatron-core wrote an iteration folder (core/dist_checkpointing/core.py):

| written by | text |
|---|---|
| core 0.3 to 0.18 | {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", ...} |
| core 0.19 on | {"sharded_backend": "torch_dist", "sharded_backend_version": 1} |

Without it Megatron takes the folder for one of torch.distributed.checkpoint (torch_dcp), which has a .metadata too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ucp.contract.companion_files import SaveFolder
from ucp.errors import (
    MalformedError,
    MissingFileError,
    SourceError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
    counted,
    listed,
)
from ucp.io.folder import absolute, is_there, names_in, path_of, short_text
from ucp_formats.megatron.names import (
    COMMON,
    DCP_METADATA,
    METADATA,
    MODEL,
    MODEL_APART,
    RELEASE,
    TRACKER,
    parse_iteration,
    parse_rank_folder,
)

__all__ = ["Located", "SavedAs", "is_of_the_format", "locate", "lost_backend", "the_folder", "unknown_version"]

_MOST_TRACKER_BYTES = 64
_INNER = ("weights", "model_weights")
"""Folders in which NeMo keeps a checkpoint of megatron-core."""
_MOST_BYTES = 1 << 20
_VERSION = 1
"""The only version there is, of any backend; megatron-core up to 0.18 refuses others (strategies/base.py)."""
_COMMON_STATE = "common_state/"
_SHOWN = 40


class SavedAs(StrEnum):
    """How an iteration was saved (`--ckpt-format`)."""

    TORCH = "torch"
    """A folder per rank, files of torch.save."""
    TORCH_DIST = "torch_dist"
    """megatron-core over torch.distributed.checkpoint."""
    ZARR = "zarr"
    """megatron-core over zarr, up to 0.15."""
    TORCH_DCP = "torch_dcp"
    """Plain torch.distributed.checkpoint: torch_dcp, or the fsdp_dtensor of Megatron-FSDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What a path resolves to."""

    root: Path
    """The iteration folder; the folder passed, when there is a problem."""
    saved_as: SavedAs
    """How it was saved."""
    reasons: tuple[str, ...]
    """What was seen on the way."""
    iterations: tuple[str, ...] = ()
    """Folders to choose from, when nothing says which; else empty."""
    dangling: str = ""
    """What the tracker names, when that is not there; else empty."""
    notes: tuple[str, ...] = ()
    """What was assumed on the way."""
    saved_in: SaveFolder | None = None
    """Folder that the iteration was saved in; None where that is not known."""


@dataclass(frozen=True, slots=True)
class _Backend:
    """What the file says."""

    name: str
    """"torch_dist" or "zarr", or what else is named."""
    version: object
    """Number of the version; 1 where it is not said."""


def locate(path: Path) -> Located | None:
    """Where the checkpoint at `path` lies, or None if there is none."""
    if not path.is_dir():
        return None
    if parse_rank_folder(path.name) is not None and _has_model(path):
        seen = _seen(path.parent, named=True)
        reasons = (f"{path.name}, a rank of it", *(seen[1:] if seen else ()))
        return Located(root=path.parent, saved_as=SavedAs.TORCH, reasons=reasons, saved_in=_parent(path.parent))
    tracked = _follow_tracker(path)
    if tracked is not None:
        return tracked
    for root in (path, *(path / name for name in _INNER)):
        seen = _seen(root, named=parse_iteration(root.name) is not None)
        if seen:
            saved_in = _parent(root) if root == path else None
            return Located(root=root, saved_as=seen[0], reasons=seen[1:], saved_in=saved_in)
    return _only_iteration(path)


def the_folder(located: Located | None, path: Path) -> Located:
    """The iteration folder found.

    Raises UnknownFormatError when there is none, MalformedError when the tracker names one that is not there, and
    UsageError when there are several.
    """
    if located is None:
        raise UnknownFormatError(
            f"expected a Megatron checkpoint at {path}: a folder with {TRACKER}, or an iteration folder such as "
            f"iter_0001000 with {METADATA} or folders like mp_rank_00"
        )
    if located.dangling:
        raise MalformedError(
            f"expected {path / located.dangling}, which {TRACKER} names; it is no checkpoint, or not there. Copy it, "
            f"or pass one that is there:\n{listed(str(path / name) for name in located.iterations)}"
        )
    if located.iterations:
        raise UsageError(
            f"{path} holds {counted(len(located.iterations), 'checkpoint')} "
            f"and no {TRACKER} that names one; pass one of them:\n"
            f"{listed(str(path / name) for name in located.iterations)}"
        )
    return located


def is_of_the_format(path: Path) -> bool:
    """Whether an entry of a save folder is an iteration, or names one."""
    return path.name == TRACKER or parse_iteration(path.name) is not None


def _parent(root: Path) -> SaveFolder | None:
    """The folder that an iteration lies in, if a tracker there says that checkpoints were saved in it."""
    root = path_of(absolute(root))
    named = _tracked_name(root.parent / TRACKER)
    if named is None or not (root.parent / named).is_dir():
        return None
    return SaveFolder(root.parent, newest="" if named == root.name else named)


def _has_model(path: Path) -> bool:
    return (path / MODEL).is_file() or (path / MODEL_APART).is_file()


def _seen(path: Path, *, named: bool) -> tuple[SavedAs, str] | None:
    """How the iteration folder `path` was saved, with the evidence; None where it is none.

    `named`: whether it is known to be an iteration folder by its name or the tracker.
    """
    backend = _read_backend(path)
    if backend is not None and backend.name in (SavedAs.TORCH_DIST, SavedAs.ZARR):
        return SavedAs(backend.name), f"{METADATA} of {backend.name}"
    ranks = sorted(name for name in names_in(path) if parse_rank_folder(name) is not None and _has_model(path / name))
    if ranks:
        return SavedAs.TORCH, f"{len(ranks)} folders such as {ranks[0]}" if len(ranks) > 1 else f"folder {ranks[0]}"
    if named and (path / DCP_METADATA).is_file():
        there = is_there(path / METADATA)
        beside = f"beside a {METADATA} that names no backend" if there else f"without {METADATA}"
        return SavedAs.TORCH_DCP, f"{DCP_METADATA} {beside}"
    return None


def _follow_tracker(path: Path) -> Located | None:
    """What the tracker in `path` leads to; None when there is no tracker, or nothing of ours."""
    name = _tracked_name(path / TRACKER)
    if name is None:
        return None
    seen = _seen(path / name, named=True)
    if seen:
        reasons = (f"{TRACKER} -> {name}", seen[1])
        return Located(root=path / name, saved_as=seen[0], reasons=reasons, saved_in=SaveFolder(path))
    there = _iterations(path)
    if not there:
        return None
    saved_as, _ = next(iter(there.values()))
    return Located(root=path, saved_as=saved_as, reasons=(TRACKER,), iterations=tuple(there), dangling=name)


def _tracked_name(file: Path) -> str | None:
    text = short_text(file, most_bytes=_MOST_TRACKER_BYTES)
    if text is None or text == RELEASE:
        return text
    return f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else None


def _iterations(path: Path) -> dict[str, tuple[SavedAs, str]]:
    """Iteration folders by name, each with how it was saved."""
    names = sorted(name for name in names_in(path) if parse_iteration(name) is not None)
    return {name: seen for name in names if (seen := _seen(path / name, named=True))}


def _only_iteration(path: Path) -> Located | None:
    there = _iterations(path)
    if not there:
        return None
    name, (saved_as, reason) = next(iter(there.items()))
    if len(there) > 1:
        reasons = (f"folders {', '.join(list(there)[:3])}",)
        return Located(root=path, saved_as=saved_as, reasons=reasons, iterations=tuple(there))
    return Located(
        root=path / name,
        saved_as=saved_as,
        reasons=(f"the only iteration, {name}", reason),
        notes=_unreadable_tracker(path, name),
        saved_in=SaveFolder(path),
    )


def _unreadable_tracker(path: Path, taken: str) -> tuple[str, ...]:
    """That a tracker is there and names no iteration; nothing when there is none."""
    if not is_there(path / TRACKER):
        return ()
    text = short_text(path / TRACKER, most_bytes=_MOST_TRACKER_BYTES)
    held = "what is no short text" if text is None else f"{text!r}" if text else "nothing"
    note = (
        f"{TRACKER} holds {held}, which is no iteration: {taken} was read, the only one there. Megatron stops at such "
        "a file. Whether it is the last one that was saved is not known"
    )
    return (note,)


def _read_backend(folder: Path) -> _Backend | None:
    """The backend that the file in `folder` names; None when there is none, or it is damaged."""
    try:
        found = json.loads(short_text(folder / METADATA, most_bytes=_MOST_BYTES) or "")
    except (ValueError, RecursionError):
        return None
    name = found.get("sharded_backend") if isinstance(found, dict) else None
    return _Backend(name, found.get("sharded_backend_version", _VERSION)) if isinstance(name, str) else None


def unknown_version(folder: Path) -> UnsupportedError | None:
    """Why a folder of a known backend is not read; None when it is of the version that is known."""
    backend = _read_backend(folder)
    if backend is None or backend.version == _VERSION:
        return None
    return UnsupportedError(
        f"expected version {_VERSION} of {backend.name} in {folder / METADATA}, which all megatron-core up to 0.19 "
        f"writes; got {str(backend.version)[:_SHOWN]!r}. Where the file is damaged, copy it again; where a later "
        "megatron-core wrote it, save with one that is known"
    )


def lost_backend(folder: Path) -> SourceError | None:
    """What is wrong with a folder that has a .metadata and no known backend; None when it is one of torch_dcp.

    The folders of torch_dcp never have the file, and neither a common state.
    """
    file = folder / METADATA
    remedy = "Copy it again from where it was saved; it is the same in all checkpoints of a run"
    wanted = f'expected the backend that wrote the folder, as in {{"sharded_backend": "torch_dist"}}, in {file}'
    backend = _read_backend(folder)
    if backend is not None:
        return UnsupportedError(f"{wanted}; got {backend.name[:_SHOWN]!r}, which is not known here. {remedy}")
    if is_there(file):
        text = short_text(file, most_bytes=_MOST_BYTES) if file.is_file() else None
        held = repr(text[:_SHOWN]) if text else "nothing"
        if text is None:
            held = "what is no text, or too long" if file.is_file() else "what is no regular file"
        return MalformedError(f"{wanted}; got {held}: it is damaged. {remedy}")
    if _is_torch_dist(folder):
        return MissingFileError(f"{wanted}; there is none, though the rest of a torch_dist checkpoint is. {remedy}")
    return None


def _is_torch_dist(folder: Path) -> bool:
    """Whether a folder without the file has what only megatron-core writes: a common state."""
    if is_there(folder / COMMON):
        return True
    try:
        from ucp.io.dcp.metadata import read_metadata

        objects = read_metadata(str(folder / DCP_METADATA)).objects
    except SourceError:
        return False
    return any(key.startswith(_COMMON_STATE) for key in objects)
