"""Which folder holds a checkpoint of torch.distributed.checkpoint, from names alone.

A user may pass the folder itself, the folder with its steps in it, or the one that accelerate and the Trainer of
transformers write: model and optimizer in folders of their own beside plain files.

    step-10/.metadata                                        torchtitan, and most scripts
    checkpoint-10/pytorch_model_fsdp_0/.metadata             accelerate, Trainer
                  optimizer_0/.metadata
    step-10/__0.metadata                                     each rank for itself (use_collectives=False)
    epoch=0.ckpt/.metadata, meta.pt                          Lightning
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ucp.errors import MissingFileError, UnknownFormatError, UsageError, counted, listed
from ucp.io.dcp.local import local_files, rank_of
from ucp.io.dcp.metadata import METADATA
from ucp.io.folder import is_there, names_in

__all__ = ["MODEL", "OPTIMIZER", "Located", "is_of_the_format", "locate", "step_in", "the_folder"]

_STEP = re.compile(r"(?:^|[-_=])(\d+)(?:\.ckpt)?$")
"""`step-10`, `checkpoint_10`, `epoch=0-step=10.ckpt`: the number at the end."""

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
"""Folders of accelerate (1.15, `fsdp_utils.py`)."""

_MEGATRON = "metadata.json"
"""Stands beside the `.metadata` of megatron-core, which is a format of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What a path resolves to."""

    root: Path
    """Folder of the checkpoint."""
    parts: tuple[str, ...] = ("",)
    """Folders in it with a `.metadata` each; the empty one is `root` itself."""
    reasons: tuple[str, ...] = ()
    """What was seen."""
    choices: tuple[str, ...] = ()
    """Folders to choose from, where there are several."""


def locate(path: Path) -> Located | None:
    """Where the checkpoint at `path` lies, or None if there is none."""
    found = _seen(path)
    if found is not None or not path.is_dir():
        return found
    if path.name in (MODEL, OPTIMIZER):
        return None
    below = {name: own for name in sorted(names_in(path)) if (own := _seen(path / name)) is not None}
    if len(below) == 1:
        ((name, own),) = below.items()
        return Located(root=own.root, parts=own.parts, reasons=(f"the only checkpoint, {name}", *own.reasons))
    return Located(root=path, choices=tuple(below), reasons=(f"folders {', '.join(below)}",)) if below else None


def _seen(path: Path) -> Located | None:
    """The checkpoint that `path` itself is."""
    names = set(names_in(path))
    files = [name for name in names if rank_of(name) is not None]
    if is_there(path / _MEGATRON):
        return None
    if METADATA in names or files:
        kinds = {METADATA: METADATA in names, "__*.metadata": local_files(names), "__*_*.distcp": files}
        reasons = [kind for kind, seen in kinds.items() if seen]
        return Located(root=path, reasons=tuple(reasons))
    parts = tuple(name for name in (MODEL, OPTIMIZER) if (path / name / METADATA).is_file())
    return Located(root=path, parts=parts, reasons=tuple(f"{name}/{METADATA}" for name in parts)) if parts else None


def the_folder(located: Located | None, path: Path) -> Located:
    """The checkpoint found. Raises UnknownFormatError, MissingFileError where it was not finished, UsageError."""
    if located is None:
        raise UnknownFormatError(
            f"expected a checkpoint of torch.distributed.checkpoint at {path}: a folder with {METADATA} and "
            "files such as __0_0.distcp"
        )
    if located.choices:
        raise UsageError(
            f"{path} holds {counted(len(located.choices), 'checkpoint')}; pass one of them:\n"
            f"{listed(str(path / name) for name in located.choices)}"
        )
    if located.parts == ("",) and not is_there(located.root / METADATA) and not local_files(names_in(located.root)):
        raise MissingFileError(
            f"expected a file at {located.root / METADATA}; there are only the items. torch writes it last, so that "
            "the checkpoint was not finished: take an earlier one, or copy it again"
        )
    return located


def is_of_the_format(path: Path) -> bool:
    """Whether an entry of a checkpoint's folder is part of the checkpoint itself."""
    return path.name in (METADATA, MODEL, OPTIMIZER) or rank_of(path.name) is not None or bool(local_files([path.name]))


STEP_KEYS = ("step", "global_step", "iteration", "iter_num")
"""Keys under which scripts save the step of the run."""
TRAIN_STATE = "train_state"
"""Key under which torchtitan saves steps and tokens."""


def step_in(name: str) -> int | None:
    """Training step in the name of a folder.

    >>> step_in("step-10"), step_in("global_step_7"), step_in("final")
    (10, 7, None)
    """
    found = _STEP.search(name)
    return None if found is None else int(found[1])
