"""Which folder holds the checkpoint, and how it was saved; from names, the tracker and metadata.json alone.

A user may pass the save folder (with its tracker), an iteration folder, or the folder of one rank. What an iteration
folder is, is decided in Megatron's own order (checkpointing.py: _get_checkpoint_format): metadata.json, then folders of
ranks, then the .metadata of torch.distributed.checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ucp.contract.companion_files import SaveFolder
from ucp.errors import MalformedError, UnknownFormatError, UsageError, counted, listed
from ucp.io.folder import names_in, short_text
from ucp_formats.megatron.backend import read_backend
from ucp_formats.megatron.names import (
    DCP_METADATA,
    METADATA,
    MODEL,
    MODEL_APART,
    RELEASE,
    TRACKER,
    parse_iteration,
    parse_rank_folder,
)

__all__ = ["Located", "SavedAs", "is_of_the_format", "locate", "the_folder"]

_MOST_TRACKER_BYTES = 64
_INNER = ("weights", "model_weights")
"""Folders in which NeMo keeps a checkpoint of megatron-core."""


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


def locate(path: Path) -> Located | None:
    """Where the checkpoint at `path` lies, or None if there is none."""
    if not path.is_dir():
        return None
    if parse_rank_folder(path.name) is not None and _has_model(path):
        seen = _seen(path.parent, named=True)
        return Located(
            root=path.parent,
            saved_as=SavedAs.TORCH,
            reasons=(f"{path.name}, a rank of it", *seen.values()),
            saved_in=_parent(path.parent),
        )
    tracked = _follow_tracker(path)
    if tracked is not None:
        return tracked
    for root in (path, *(path / name for name in _INNER)):
        for saved_as, reason in _seen(root, named=_is_named(root)).items():
            saved_in = _parent(root) if root == path else None
            return Located(root=root, saved_as=saved_as, reasons=(reason,), saved_in=saved_in)
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
    root = Path(os.path.abspath(root))
    named = _tracked_name(root.parent / TRACKER)
    if named is None or not (root.parent / named).is_dir():
        return None
    return SaveFolder(root.parent, newest="" if named == root.name else named)


def _has_model(path: Path) -> bool:
    return (path / MODEL).is_file() or (path / MODEL_APART).is_file()


def _is_named(path: Path) -> bool:
    """Whether the name of a folder, or the tracker beside it, says that it is an iteration of Megatron."""
    return parse_iteration(path.name) is not None


def _seen(path: Path, *, named: bool) -> dict[SavedAs, str]:
    """How the iteration folder `path` was saved, with the evidence; at most one entry.

    `named`: whether it is known to be an iteration folder by its name or the tracker.
    """
    backend = _backend(path)
    if backend is not None:
        return {backend: f"{METADATA} of {backend}"}
    ranks = sorted(name for name in names_in(path) if parse_rank_folder(name) is not None and _has_model(path / name))
    if ranks:
        return {SavedAs.TORCH: f"{len(ranks)} folders such as {ranks[0]}" if len(ranks) > 1 else f"folder {ranks[0]}"}
    if named and (path / DCP_METADATA).is_file():
        beside = (
            f"beside a {METADATA} that names no backend" if os.path.lexists(path / METADATA) else f"without {METADATA}"
        )
        return {SavedAs.TORCH_DCP: f"{DCP_METADATA} {beside}"}
    return {}


def _backend(folder: Path) -> SavedAs | None:
    """The backend of megatron-core that a metadata.json names; None when it names none that is known."""
    backend = read_backend(folder)
    known = (SavedAs.TORCH_DIST, SavedAs.ZARR)
    return next((own for own in known if backend is not None and own.value == backend.name), None)


def _follow_tracker(path: Path) -> Located | None:
    """What the tracker in `path` leads to; None when there is no tracker, or nothing of ours."""
    name = _tracked_name(path / TRACKER)
    if name is None:
        return None
    for saved_as, reason in _seen(path / name, named=True).items():
        reasons = (f"{TRACKER} -> {name}", reason)
        return Located(root=path / name, saved_as=saved_as, reasons=reasons, saved_in=SaveFolder(path))
    there = _iterations(path)
    if not there:
        return None
    saved_as = next(iter(_seen(path / there[0], named=True)))
    return Located(root=path, saved_as=saved_as, reasons=(TRACKER,), iterations=there, dangling=name)


def _tracked_name(file: Path) -> str | None:
    text = short_text(file, most_bytes=_MOST_TRACKER_BYTES)
    if text is None or text == RELEASE:
        return text
    return f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else None


def _iterations(path: Path) -> tuple[str, ...]:
    found = [name for name in names_in(path) if parse_iteration(name) is not None and _seen(path / name, named=True)]
    return tuple(sorted(found))


def _only_iteration(path: Path) -> Located | None:
    there = _iterations(path)
    if not there:
        return None
    (saved_as, reason), *_ = _seen(path / there[0], named=True).items()
    if len(there) == 1:
        reasons = (f"the only iteration, {there[0]}", reason)
        return Located(
            root=path / there[0],
            saved_as=saved_as,
            reasons=reasons,
            notes=_unreadable_tracker(path, there[0]),
            saved_in=SaveFolder(path),
        )
    return Located(root=path, saved_as=saved_as, reasons=(f"folders {', '.join(there[:3])}",), iterations=there)


def _unreadable_tracker(path: Path, taken: str) -> tuple[str, ...]:
    """That a tracker is there and names no iteration; nothing when there is none."""
    if not os.path.lexists(path / TRACKER):
        return ()
    text = short_text(path / TRACKER, most_bytes=_MOST_TRACKER_BYTES)
    held = "what is no short text" if text is None else f"{text!r}" if text else "nothing"
    note = (
        f"{TRACKER} holds {held}, which is no iteration: {taken} was read, the only one there. Megatron stops at such "
        "a file. Whether it is the last one that was saved is not known"
    )
    return (note,)
