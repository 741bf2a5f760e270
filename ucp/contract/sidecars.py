"""Sidecar files: files beside a checkpoint that a training script saves and resumes from (`--companions`).

Examples are trainer_state.json, scheduler.pt, the tokenizer, the RNG states of ranks. No format reads them; they are
copied byte for byte. An index has an extra `companion/NAME` for each, whose value refers to all bytes of the file.
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
from ucp.errors import MalformedError, format_count
from ucp.io.folder import MARK, PARTIAL, names_of_folder, path_of, to_absolute
from ucp.io.provenance import source_file

MOST_SMALL = 64 << 20
"""Bytes of the largest sidecar file that is copied by default."""

_OF_A_RANK = re.compile(r"rng_state(?:_(?P<trainer>\d+))?\.pth|random_states_(?P<accelerate>\d+)\.pkl")
"""Files of single ranks: of the Trainer (transformers/trainer.py: _save_rng_state) and of accelerate (constants.py).

Examples: rng_state_3.pth, rng_state.pth (of a run of one rank), random_states_3.pkl.
"""
_ADAPTER = re.compile(r"adapter_model\.(?:safetensors|bin)|adapter_config\.json")
"""Files of PEFT (peft/utils/constants.py: CONFIG_NAME, WEIGHTS_NAME, SAFETENSORS_WEIGHTS_NAME)."""
_MOST_SHOWN = 24


class SidecarPolicy(StrEnum):
    """Which sidecar files to copy."""

    SMALL = "small"
    """Those of at most `MOST_SMALL` bytes."""
    ALL = "all"
    """All."""
    NONE = "none"
    """None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarFile:
    """A file beside a checkpoint."""

    name: str
    """Name, without a path."""
    rank: int | None
    """Rank that saved it for itself; None for all ranks."""
    ref: TensorRef
    """All bytes of the file."""


def sidecar_extra(name: str, path: str, nbytes: int) -> Extra:
    """The extra for the file `path` of `nbytes` bytes.

    >>> sidecar_extra("rng_state_3.pth", "ckpt/rng_state_3.pth", 14244).rank
    3
    """
    match = _OF_A_RANK.fullmatch(name)
    rank = None if match is None else int(match["trainer"] or match["accelerate"] or 0)
    ref = TensorRef(path=path, offset=0, dtype=DType.UINT8, shape=(nbytes,), strides=(1,))
    return Extra(name=SIDECAR + name, value=ref, rank=rank)


def _is_plain_name(name: str) -> bool:
    """Whether `name` is a file name that can be printed."""
    return name.isprintable() and "/" not in name and name not in ("", ".", "..")


def list_sidecars(index: Index) -> Iterator[SidecarFile]:
    """Sidecar files of a checkpoint. Raises MalformedError for an extra of a damaged store that cannot be one."""
    for extra in (extra for extra in index.extras if extra.is_sidecar):
        name, ref = extra.name.removeprefix(SIDECAR), extra.value
        is_whole = isinstance(ref, TensorRef) and ref.dtype is DType.UINT8 and len(ref.shape) == 1 and ref.is_contiguous
        if not isinstance(ref, TensorRef) or not is_whole or not _is_plain_name(name):
            raise MalformedError(
                f"expected the extra {extra.name!r} of {index.path} to be the bytes of a file, under a name without "
                "slashes; got something else. The store is damaged: make it again"
            )
        yield SidecarFile(name=name, rank=extra.rank, ref=ref)


def select_sidecars(index: Index, policy: SidecarPolicy) -> Index:
    """`index` with the sidecar files that `policy` keeps, and a line for the others."""
    if policy is SidecarPolicy.ALL:
        return index
    sidecars = list(list_sidecars(index))
    left_behind = [sidecar for sidecar in sidecars if policy is SidecarPolicy.NONE or sidecar.ref.nbytes > MOST_SMALL]
    if not left_behind:
        return index
    names = {SIDECAR + sidecar.name for sidecar in left_behind}
    why = (
        "--companions none"
        if policy is SidecarPolicy.NONE
        else f"larger than {MOST_SMALL >> 20} MiB: pass --companions all to copy them, too"
    )
    return replace(
        index,
        extras=tuple(extra for extra in index.extras if extra.name not in names),
        dropped=(
            *index.dropped,
            describe_left((f"{sidecar.name} ({sidecar.ref.nbytes:,} bytes)" for sidecar in left_behind), why),
        ),
    )


def add_sidecars(index: Index, plan: TargetPlan, *, reserved: Iterable[str] = ()) -> TargetPlan:
    """`plan` with the sidecar files of `index`.

    Files that a rank saved for itself are copied only if the target has as many ranks. `reserved`: names of the files
    that the target writes last, which are not in the plan.
    """
    used_names = {*reserved, *(file.path.partition("/")[0] for file in plan.files)}
    before, now = index.topology.ranks, None if plan.topology is None else plan.topology.ranks
    wrong_ranks = f"files of single ranks; there were {format_count(before, 'rank')}, and " + (
        f"there will be {now:,}" if now else "the output is for any number of ranks"
    )
    carried: list[SidecarFile] = []
    left_behind: dict[str, list[str]] = {}
    for sidecar in list_sidecars(index):
        if sidecar.name in used_names:
            left_behind.setdefault("the target writes a file of that name itself", []).append(sidecar.name)
        elif sidecar.rank is not None and now != before:
            left_behind.setdefault(wrong_ranks, []).append(sidecar.name)
        else:
            carried.append(sidecar)
            used_names.add(sidecar.name)
    note = f"carried along (files beside the checkpoint): {_names_text(sidecar.name for sidecar in carried)}"
    return replace(
        plan,
        files=(*plan.files, *(OutputFile(path=sidecar.name, nbytes=sidecar.ref.nbytes) for sidecar in carried)),
        raw=(
            *plan.raw,
            *(RawCopy(src=sidecar.ref, path=sidecar.name, offset=0) for sidecar in carried if sidecar.ref.nbytes),
        ),
        notes=(*plan.notes, note) if carried else plan.notes,
        dropped=(*plan.dropped, *(describe_left(names, reason) for reason, names in left_behind.items())),
    )


def is_adapter(name: str) -> bool:
    """Whether a file belongs to a LoRA adapter."""
    return _ADAPTER.fullmatch(name) is not None


def describe_left(names: Iterable[str], reason: str) -> str:
    """Line about files beside the checkpoint that are not copied."""
    return f"{_names_text(names)}, beside the checkpoint: {reason}"


def _names_text(names: Iterable[str]) -> str:
    """Names in one line, shortened."""
    all_names = list(names)
    rest = f" and {len(all_names) - _MOST_SHOWN:,} more" if len(all_names) > _MOST_SHOWN else ""
    return ", ".join(all_names[:_MOST_SHOWN]) + rest


def attach_sidecars(index: Index, folder: SaveFolder | None, *, is_own: Callable[[Path], bool]) -> Index:
    """`index` with the files of `folder` as extras, and a line for other entries there (links, folders).

    `is_own`: whether an entry belongs to the format: a checkpoint, or a file that names one. No `folder`: no sidecars.
    """
    if folder is None:
        return index
    files: list[SourceFile] = []
    left_behind: dict[str, list[str]] = {}
    adapter: list[str] = []
    try:
        for name in sorted(names_of_folder(root := path_of(to_absolute(folder.path)))):
            entry = root / name
            made_here = name == MARK or name.endswith(PARTIAL) or (entry / MARK).is_file()
            if made_here or is_own(entry):
                continue
            if is_adapter(entry.name):
                adapter.append(entry.name)
            reason = _reason(entry) or (f"saved with {folder.newest}, the newest checkpoint" if folder.newest else "")
            if reason:
                left_behind.setdefault(reason, []).append(ascii(entry.name)[1:-1])
            else:
                files.append(source_file(str(entry), "companion file"))
    except OSError as error:
        left_behind = {f"cannot be read ({error.strerror})": [str(error.filename or folder.path)]}
    unmerged: tuple[str, ...] = ()
    if adapter:
        text = (
            f"{_names_text(adapter)}: a LoRA adapter beside the model, which is not read or merged: the result is the "
            "base model alone. To include it, merge it with PEFT (merge_and_unload), save the model, and pass that"
        )
        unmerged = (text,)
    return replace(
        index,
        notes=(*index.notes, *unmerged),
        extras=(*index.extras, *(sidecar_extra(os.path.basename(file.path), file.path, file.nbytes) for file in files)),
        files=(*index.files, *files),
        dropped=(*index.dropped, *(describe_left(names, reason) for reason, names in left_behind.items()), *unmerged),
    )


def _reason(entry: Path) -> str:
    """Why an entry is not copied; empty if it is."""
    if entry.is_symlink():
        return "links are not followed"
    if entry.is_dir():
        return "folders are not carried along"
    if not entry.is_file():
        return "not regular files"
    return "" if _is_plain_name(entry.name) else "their names are not printable text"
