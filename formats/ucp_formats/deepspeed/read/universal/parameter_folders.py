"""`zero/` of a universal checkpoint: a folder per parameter with a file per state.

A parameter with "/" in its name is in a nested folder, because DeepSpeed joins `zero/` and the name to a path. A file
holds a dict with the tensor under `param` (ZeRO up to stage 2), only a flat tensor, whose shape the model-states files
record (ZeRO-3), or only a number, for `step` (checkpoint/ds_to_universal.py, 0.19.8).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ucp.contract.output_names import check_named
from ucp.contract.ranks import Problems
from ucp.core.index import STEP, WEIGHT, StateIndex
from ucp.core.tensor import Record, TensorRef, contiguous_strides
from ucp.core.union import state_from_scalar
from ucp.errors import CorruptError, SourceError
from ucp.io.folder import is_url, names_of_folder
from ucp.io.pickle.fields import Shape, describe_value
from ucp.io.torch_file.archive import read_archive

GLOBALS = "optimizer_state.pt"
"""File in `zero/` beside the folders of parameters."""

_TAKEN_FOR_STATES = re.compile("(.+).pt")
"""Expression by which stages 1 and 2 recognise files of states among the entries of a parameter's folder; its dot
matches any character (checkpoint/universal_checkpoint.py, 0.19.8). So an entry "prompt" is taken for a file pro.pt."""


def state_path(tag: str, param: str, stem: str) -> str:
    """Path of the file of a parameter's state, relative to the destination; `stem`: the file's name without .pt."""
    return f"{tag}/zero/{param}/{stem}.pt"


def check_places(tag: str, stems: Mapping[str, Collection[str]]) -> None:
    """Raise DestinationError that lists all parameters whose names cannot be folders.

    `stems`: parameter to the stems of its files.
    """
    faults = []
    for param, param_stems in stems.items():
        faults += [(param, f"its state {stem!r} has a '/' in its name") for stem in param_stems if "/" in stem]
        parts = param.split("/")
        for count in range(1, len(parts)):
            outer = "/".join(parts[:count])
            if outer in stems and _TAKEN_FOR_STATES.search(parts[count]):
                why = f"DeepSpeed would take the folder {parts[count]!r} in that of {outer!r} for a file of states"
                faults.append((param, why))
    check_named(
        [(param, state_path(tag, param, stem)) for param, param_stems in stems.items() for stem in param_stems],
        expected="names of parameters that can be folders (zero/<parameter>/<state>.pt)",
        remedy="rename them in the model, or write native files (--to deepspeed), which name no file after a parameter",
        reserved=[f"{tag}/zero/{GLOBALS}"],
        faults=faults,
    )


_STATES = {"fp32": WEIGHT}
"""Stem of a file to the name of the state, where they differ."""

_LONGEST = 4096
"""Characters of a path, at most (PATH_MAX of Linux)."""


@dataclass(slots=True)
class ParameterFolders:
    """The contents of `zero/`."""

    states: dict[str, dict[str, StateIndex]] = field(default_factory=dict)
    """Parameter to state name to where the state is."""
    info: dict[str, dict[str, object]] = field(default_factory=dict)
    """Parameter to what its files record besides the tensor (`cat_dim`, `vocab_tensor`, ...)."""
    files: list[tuple[str, str]] = field(default_factory=list)
    """Path and role of every file."""
    records: list[Record] = field(default_factory=list)
    """Checksums of the storages in the files."""
    strays: list[str] = field(default_factory=list)
    """Entries that are neither a parameter nor a state."""


def read_parameter_folders(zero: Path, shapes: Mapping[str, Shape], problems: Problems) -> ParameterFolders:
    """Read every folder of `zero`; files that cannot be read go to `problems`.

    `shapes`: parameters whose shape the model-states files record; a flat tensor of such a parameter gets its shape. A
    folder inside a parameter's folder is itself a parameter only if `shapes` names it.
    """
    folders = ParameterFolders()
    for param, files in _list_folders(zero, shapes, folders):
        if "fp32.pt" not in files:
            problems.missing.append(f"zero/{param}/fp32.pt")
        states = {}
        for file in files:
            state = _STATES.get(file.removesuffix(".pt"), file.removesuffix(".pt"))
            index = _read_state(zero / param / file, (param, state), shapes.get(param), folders, problems)
            if index is not None:
                states[state] = index
        folders.states[param] = {name: states[name] for name in sorted(states, key=lambda name: name != WEIGHT)}
    return folders


def _list_folders(
    zero: Path, shapes: Mapping[str, Shape], folders: ParameterFolders
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each parameter in `zero` with its files, then those nested in its folder; other entries become strays."""
    known: set[str] = set()  # folders of the parameters in `shapes`, and the folders around them
    for name in shapes:
        folder = name if len(name) <= _LONGEST else ""
        while folder and folder not in known:
            known.add(folder)
            folder = folder.rpartition("/")[0]
    waiting = [""]
    while waiting:
        name = waiting.pop()
        inner, others = _list_entries(zero / name, follow_links=not name)
        files = tuple(file for file in others if name and file.endswith(".pt"))
        is_parameter = bool(files) or name in shapes
        below = [f"{name}/{folder}" if name else folder for folder in inner]
        nested = [folder for folder in below if not is_parameter or folder in known]
        if is_parameter or (name and not nested):
            yield name, files
        strays = (file for file in others if not (file.endswith(".pt") if name else file == GLOBALS))
        folders.strays += [f"{name}/{file}" if name else file for file in strays]
        folders.strays += [folder for folder in below if is_parameter and folder not in known]
        waiting += reversed(nested)


def _list_entries(folder: Path, *, follow_links: bool) -> tuple[list[str], list[str]]:
    """Names of the folders in a folder, and of all other entries, sorted."""
    inner: list[str] = []
    others: list[str] = []
    if is_url(str(folder)):
        for name in sorted(names_of_folder(folder)):
            (inner if (folder / name).is_dir() else others).append(name)
        return inner, others
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            (inner if entry.is_dir(follow_symlinks=follow_links) else others).append(entry.name)
    return inner, others


_UNNAMED = "archive"
"""Name that torch records if it saves to a file object, not to a path."""


def _read_state(
    path: Path, of: tuple[str, str], shape: Shape | None, folders: ParameterFolders, problems: Problems
) -> StateIndex | None:
    """Where the state in the file `path` is; None, with a problem, if the file holds none. `of`: (parameter, state)."""
    param, state = of
    where = f"zero/{param}/{path.name}"
    try:
        archive = read_archive(str(path))
    except (SourceError, CorruptError) as error:
        problems.wrong.append(f"{where}: {str(error).replace(f'{path}: ', '').replace(f'{path.parent}/', '')}")
        return None
    if archive.saved_as not in ("", _UNNAMED, path.stem):
        problems.wrong.append(f"{where}: expected the file that was saved as {path.name}; got {archive.saved_as}.pt")
    value = archive.root
    if isinstance(value, dict) and "param" in value:
        rest = {str(key): item for key, item in value.items() if key != "param"}
        if rest and state == WEIGHT:
            folders.info[param] = rest
        value = value["param"]
    folders.files.append((str(path), f"{state} of {param}"))
    folders.records += archive.records
    index = (
        state_from_scalar(value) if not isinstance(value, TensorRef) or state == STEP else _tensor_state(value, shape)
    )
    if index is None:
        expected = "a number or a tensor" if shape is None else f"a tensor of {list(shape)}"
        problems.wrong.append(f"{where}: expected {expected}; got {describe_value(value)}")
    return index


def _tensor_state(ref: TensorRef, shape: Shape | None) -> StateIndex | None:
    """The state in a tensor; a flat tensor gets its parameter's shape. None if the number of elements differs."""
    if shape is not None and ref.shape != shape:
        if ref.is_contiguous and ref.numel == prod(shape):
            ref = TensorRef(
                path=ref.path, offset=ref.offset, dtype=ref.dtype, shape=shape, strides=contiguous_strides(shape)
            )
        elif len(ref.shape) < 2:
            return None
    return StateIndex.from_tensor(ref)
