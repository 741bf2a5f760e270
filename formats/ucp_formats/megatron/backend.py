"""metadata.json, which says what backend of megatron-core wrote an iteration folder (core/dist_checkpointing/core.py).

| written by | text |
|---|---|
| core 0.3 to 0.18 | {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", ...} |
| core 0.19 on | {"sharded_backend": "torch_dist", "sharded_backend_version": 1} |

Without it Megatron takes the folder for one of torch.distributed.checkpoint (torch_dcp), which has a .metadata too.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from ucp.errors import MalformedError, MissingFileError, SourceError, UnsupportedError
from ucp.io.folder import short_text
from ucp_formats.megatron.names import COMMON, DCP_METADATA, METADATA

__all__ = ["Backend", "lost_backend", "read_backend", "unknown_version"]

_MOST_BYTES = 1 << 20
_VERSION = 1
"""The only version there is, of any backend; megatron-core up to 0.18 refuses others (strategies/base.py)."""
_COMMON_STATE = "common_state/"
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Backend:
    """What the file says."""

    name: str
    """"torch_dist" or "zarr", or what else is named."""
    version: object
    """Number of the version; 1 where it is not said."""


def read_backend(folder: Path) -> Backend | None:
    """The backend that the file in `folder` names; None when there is none, or it is damaged."""
    try:
        found = json.loads(short_text(folder / METADATA, most_bytes=_MOST_BYTES) or "")
    except (ValueError, RecursionError):
        return None
    name = found.get("sharded_backend") if isinstance(found, dict) else None
    return Backend(name, found.get("sharded_backend_version", _VERSION)) if isinstance(name, str) else None


def unknown_version(folder: Path) -> UnsupportedError | None:
    """Why a folder of a known backend is not read; None when it is of the version that is known."""
    backend = read_backend(folder)
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
    backend = read_backend(folder)
    if backend is not None:
        return UnsupportedError(f"{wanted}; got {backend.name[:_SHOWN]!r}, which is not known here. {remedy}")
    if os.path.lexists(file):
        return MalformedError(f"{wanted}; got {_contents(file)}: it is damaged. {remedy}")
    if _is_torch_dist(folder):
        return MissingFileError(f"{wanted}; there is none, though the rest of a torch_dist checkpoint is. {remedy}")
    return None


def _contents(file: Path) -> str:
    if not file.is_file():
        return "what is no regular file"
    text = short_text(file, most_bytes=_MOST_BYTES)
    if text is None:
        return "what is no text, or too long"
    return f"{text[:_SHOWN]!r}" if text else "nothing"


def _is_torch_dist(folder: Path) -> bool:
    """Whether a folder without the file has what only megatron-core writes: a common state."""
    if os.path.lexists(folder / COMMON):
        return True
    try:
        from ucp.io.dcp.metadata import read_metadata

        objects = read_metadata(str(folder / DCP_METADATA)).objects
    except SourceError:
        return False
    return any(key.startswith(_COMMON_STATE) for key in objects)
