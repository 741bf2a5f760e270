"""Which folder holds a checkpoint of torch.distributed.checkpoint, from names alone.

A user may pass the folder itself, the folder of all steps, or a folder of accelerate or of the Trainer of transformers,
which keep model and optimizer in separate folders beside plain files.

    step-10/.metadata                                        torchtitan, and most scripts
    checkpoint-10/pytorch_model_fsdp_0/.metadata             accelerate, Trainer
                  optimizer_0/.metadata
    step-10/__0.metadata                                     each rank for itself (use_collectives=False)
    epoch=0.ckpt/.metadata, meta.pt                          Lightning
"""

from __future__ import annotations

import re
from pathlib import Path

from ucp.contract import locating
from ucp.contract.locating import Located, require_checkpoint
from ucp.contract.registry import is_owned_by_another
from ucp.errors import MissingFileError
from ucp.io.dcp.checkpoint import find_local_files, parse_rank
from ucp.io.dcp.metadata import METADATA
from ucp.io.folder import exists, names_in

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
"""Folders of accelerate (1.15, `fsdp_utils.py`)."""
_STEP = re.compile(r"(?:^|[-_=])(\d+)(?:\.ckpt)?$")
"""`step-10`, `checkpoint_10`, `epoch=0-step=10.ckpt`: the number at the end."""


def locate(path: Path) -> Located[tuple[str, ...]] | None:
    """The checkpoint at `path`, with its folders that have a `.metadata` ("": itself); None if there is none."""
    return locating.locate(path, _look)


def _look(path: Path) -> Located[tuple[str, ...]] | None:
    names = set(names_in(path))
    others = {name for name in names if parse_rank(name) is None}
    items = len(others) < len(names)
    if METADATA in names or items:
        if any(is_owned_by_another(name, "dcp") for name in others):
            return None  # its format contains DCP files
        kinds = {METADATA: METADATA in names, "__*.metadata": bool(find_local_files(names)), "__*_*.distcp": items}
        return Located(
            root=path, content=("",), reasons=tuple(kind for kind, is_present in kinds.items() if is_present)
        )
    parts = tuple(name for name in (MODEL, OPTIMIZER) if (path / name / METADATA).is_file())
    reasons = tuple(f"{name}/{METADATA}" for name in parts)
    return Located(root=path, content=parts, reasons=reasons) if parts else None


def check_folder(located: Located[tuple[str, ...]] | None, path: Path) -> Located[tuple[str, ...]]:
    """`located`, if it is complete. Raises UnknownFormatError, UsageError, MissingFileError for an unfinished save."""
    example = f"a folder with {METADATA} and files such as __0_0.distcp"
    located = require_checkpoint(located, path, "a checkpoint of torch.distributed.checkpoint", example)
    if (
        located.content == ("",)
        and not exists(located.root / METADATA)
        and not find_local_files(names_in(located.root))
    ):
        raise MissingFileError(
            f"expected a file at {located.root / METADATA}; got only the files of items. torch writes it last: "
            "the checkpoint was not finished. Take an earlier one, or copy it again"
        )
    return located


def is_of_the_format(path: Path) -> bool:
    """Whether an entry of a checkpoint's folder is part of the checkpoint itself."""
    return (
        path.name in (METADATA, MODEL, OPTIMIZER)
        or parse_rank(path.name) is not None
        or bool(find_local_files([path.name]))
    )


def step_in(name: str) -> int | None:
    """Training step in the name of a folder.

    >>> step_in("step-10"), step_in("global_step_7"), step_in("final")
    (10, 7, None)
    """
    match = _STEP.search(name)
    return None if match is None else int(match[1])
