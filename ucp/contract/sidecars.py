"""Companion files: what a training script keeps beside a checkpoint, and cannot go on without.

A trainer saves its own state next to the files of its framework: trainer_state.json, scheduler.pt, the tokenizer, the
random states of ranks. No format knows them. They go with the checkpoint byte for byte: in an index each is an extra,
`companion/NAME`, whose value refers to all bytes of the file; an atom store keeps it as one; a target of a framework
writes it beside its own files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ucp.contract.locating import SaveFolder
from ucp.core.index import SIDECAR, Extra, Index, SourceFile
from ucp.core.target import OutputFile, RawCopy, TargetPlan
from ucp.core.tensor import DType, TensorRef
from ucp.errors import MalformedError, counted
from ucp.io.folder import MARK, PARTIAL, names_of_folder, path_of, to_absolute
from ucp.io.provenance import source_file

MOST_SMALL = 64 << 20
"""Bytes of the largest companion file that is carried along unasked."""

_OF_A_RANK = re.compile(r"rng_state(?:_(?P<trainer>\d+))?\.pth|random_states_(?P<accelerate>\d+)\.pkl")
"""Files of single ranks: of the Trainer (transformers/trainer.py: _save_rng_state) and of accelerate (constants.py).

Examples: rng_state_3.pth, rng_state.pth (of a run of one rank), random_states_3.pkl.
"""
_ADAPTER = re.compile(r"adapter_model\.(?:safetensors|bin)|adapter_config\.json")
"""Files of PEFT (peft/utils/constants.py: CONFIG_NAME, WEIGHTS_NAME, SAFETENSORS_WEIGHTS_NAME)."""
_MOST_SHOWN = 24


class SidecarPolicy(StrEnum):
    """Which companion files to carry along."""

    SMALL = "small"
    """Those of up to `MOST_SMALL` bytes each."""
    ALL = "all"
    """All of them."""
    NONE = "none"
    """None of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarFile:
    """A file beside a checkpoint."""

    name: str
    """Its name; it lies in the folder itself, in none below."""
    rank: int | None
    """Rank that saved it for itself; None for all."""
    ref: TensorRef
    """Its bytes, all of them."""


def sidecar_extra(name: str, path: str, nbytes: int) -> Extra:
    """The extra that stands for the file `path` of `nbytes` bytes.

    >>> sidecar_extra("rng_state_3.pth", "ckpt/rng_state_3.pth", 14244).rank
    3
    """
    found = _OF_A_RANK.fullmatch(name)
    rank = None if found is None else int(found["trainer"] or found["accelerate"] or 0)
    ref = TensorRef(path=path, offset=0, dtype=DType.UINT8, shape=(nbytes,), strides=(1,))
    return Extra(name=SIDECAR + name, value=ref, rank=rank)


def _is_plain_name(name: str) -> bool:
    """Whether `name` can be that of a file in a folder, and be shown in a line of text."""
    return name.isprintable() and "/" not in name and name not in ("", ".", "..")


def list_sidecars(index: Index) -> Iterator[SidecarFile]:
    """Companion files of a checkpoint. Raises MalformedError for an extra that can be none: of a damaged store."""
    for extra in (extra for extra in index.extras if extra.is_sidecar):
        name, ref = extra.name.removeprefix(SIDECAR), extra.value
        is_whole = isinstance(ref, TensorRef) and ref.dtype is DType.UINT8 and len(ref.shape) == 1 and ref.is_contiguous
        if not isinstance(ref, TensorRef) or not is_whole or not _is_plain_name(name):
            raise MalformedError(
                f"expected the bytes of a file of a name without a path as the extra {extra.name!r} of {index.path}; "
                "got something else. The store is damaged: make it again"
            )
        yield SidecarFile(name=name, rank=extra.rank, ref=ref)


def select_sidecars(index: Index, policy: SidecarPolicy) -> Index:
    """`index` with the companion files that `policy` takes along, and a line for those that it leaves."""
    if policy is SidecarPolicy.ALL:
        return index
    every = list(list_sidecars(index))
    left = [own for own in every if policy is SidecarPolicy.NONE or own.ref.nbytes > MOST_SMALL]
    if not left:
        return index
    names = {SIDECAR + own.name for own in left}
    why = (
        "--companions none"
        if policy is SidecarPolicy.NONE
        else f"larger than {MOST_SMALL >> 20} MiB, and --companions all was not asked for"
    )
    return replace(
        index,
        extras=tuple(extra for extra in index.extras if extra.name not in names),
        dropped=(*index.dropped, describe_left((f"{own.name} ({own.ref.nbytes:,} bytes)" for own in left), why)),
    )


def add_sidecars(index: Index, plan: TargetPlan, *, reserved: Iterable[str] = ()) -> TargetPlan:
    """`plan`, with the companion files of `index` beside its files.

    Those that a rank saved for itself go only to a run of as many ranks. `own`: names of the files that the target
    writes last, which are not in the plan.
    """
    taken = {*reserved, *(file.path.partition("/")[0] for file in plan.files)}
    before, now = index.topology.ranks, None if plan.topology is None else plan.topology.ranks
    alien = (
        f"of single ranks; there were {counted(before, 'rank')}, and will be {now:,}"
        if now
        else (f"of single ranks, of {counted(before, 'rank')}; what is written is for any number of them")
    )
    carried: list[SidecarFile] = []
    left: dict[str, list[str]] = {}
    for found in list_sidecars(index):
        if found.name in taken:
            left.setdefault("the target writes what has that name itself", []).append(found.name)
        elif found.rank is not None and now != before:
            left.setdefault(alien, []).append(found.name)
        else:
            carried.append(found)
            taken.add(found.name)
    note = f"carried along from beside the checkpoint: {_names_text(own.name for own in carried)}"
    return replace(
        plan,
        files=(*plan.files, *(OutputFile(path=own.name, nbytes=own.ref.nbytes) for own in carried)),
        raw=(*plan.raw, *(RawCopy(src=own.ref, path=own.name, offset=0) for own in carried if own.ref.nbytes)),
        notes=(*plan.notes, note) if carried else plan.notes,
        dropped=(*plan.dropped, *(describe_left(names, reason) for reason, names in left.items())),
    )


def is_adapter(name: str) -> bool:
    """Whether a file is of a LoRA adapter."""
    return _ADAPTER.fullmatch(name) is not None


def _adapter_text(names: Iterable[str]) -> str:
    """That the adapter in files of such names is not part of the result."""
    return (
        f"{_names_text(sorted(names))}: a LoRA adapter beside the model, which is not read or merged: the result is "
        "the base model alone. To include it, merge it with PEFT (merge_and_unload), save the model, and pass that"
    )


def describe_left(names: Iterable[str], reason: str) -> str:
    """That files beside the checkpoint are not carried along."""
    return f"{_names_text(names)}, beside the checkpoint: {reason}"


def _names_text(names: Iterable[str]) -> str:
    """Names in a line, long lists cut."""
    every = list(names)
    rest = f" and {len(every) - _MOST_SHOWN:,} more" if len(every) > _MOST_SHOWN else ""
    return ", ".join(every[:_MOST_SHOWN]) + rest


def attach_sidecars(index: Index, folder: SaveFolder | None, *, is_own: Callable[[Path], bool]) -> Index:
    """`index`, with the files of `folder` as extras, and a line for whatever else lies there.

    Links are never followed, folders not entered. `is_own`: whether an entry is the format's: a checkpoint, or the file
    that names one. Without a `folder` there is nothing beside the checkpoint.
    """
    if folder is None:
        return index
    files: list[SourceFile] = []
    left: dict[str, list[str]] = {}
    adapter: list[str] = []
    try:
        for name in sorted(names_of_folder(root := path_of(to_absolute(folder.path)))):
            entry = root / name
            made_here = name == MARK or name.endswith(PARTIAL) or (entry / MARK).is_file()
            if made_here or is_own(entry):
                continue
            if is_adapter(entry.name):
                adapter.append(entry.name)
            reason = _reason(entry) or (f"of {folder.newest}, which was saved last" if folder.newest else "")
            if reason:
                left.setdefault(reason, []).append(ascii(entry.name)[1:-1])
            else:
                files.append(source_file(str(entry), "companion file"))
    except OSError as error:
        left = {f"cannot be read ({error.strerror})": [str(error.filename or folder.path)]}
    unmerged = (_adapter_text(adapter),) if adapter else ()
    return replace(
        index,
        notes=(*index.notes, *unmerged),
        extras=(*index.extras, *(sidecar_extra(os.path.basename(own.path), own.path, own.nbytes) for own in files)),
        files=(*index.files, *files),
        dropped=(*index.dropped, *(describe_left(names, reason) for reason, names in left.items()), *unmerged),
    )


def _reason(entry: Path) -> str:
    """Why an entry is not carried along; empty where it is."""
    if entry.is_symlink():
        return "links are not followed"
    if entry.is_dir():
        return "folders are not carried along"
    if not entry.is_file():
        return "no regular files"
    return "" if _is_plain_name(entry.name) else "names that are no plain text"
