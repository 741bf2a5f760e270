"""`zero/` of a universal checkpoint: a folder per parameter with a file per state.

A parameter with "/" in its name lies in a folder of a folder, as DeepSpeed joins the two to a path. A file holds a dict
with the tensor under `param` (ZeRO up to stage 2), a bare flat tensor whose shape is known elsewhere (ZeRO-3), or for
`step` a bare number (checkpoint/ds_to_universal.py, 0.19.8).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ucp.contract.output_names import check_named
from ucp.contract.problems import Problems
from ucp.contract.scalars import scalar_state
from ucp.core.index import StateIndex
from ucp.core.names import STEP, WEIGHT
from ucp.core.tensor import Record, TensorRef, contiguous_strides
from ucp.errors import CorruptError, SourceError
from ucp.io.folder import is_url, names_of_folder
from ucp.io.pickle.fields import Shape, described
from ucp.io.torch_file.archive import read_archive

__all__ = ["GLOBALS", "ParameterFolders", "check_places", "read_parameter_folders", "state_path"]

GLOBALS = "optimizer_state.pt"
"""File in `zero/` beside the folders of parameters."""

_TAKEN_FOR_STATES = re.compile("(.+).pt")
"""What stages 1 and 2 search for in every entry of a parameter's folder, whose dot is any character
(checkpoint/universal_checkpoint.py, 0.19.8). Example: "prompt", which is taken for a file pro.pt."""


def state_path(tag: str, param: str, stem: str) -> str:
    """Path, relative to the destination, of a parameter's state; `stem`: of the file's name."""
    return f"{tag}/zero/{param}/{stem}.pt"


def check_places(tag: str, stems: Mapping[str, Collection[str]]) -> None:
    """Raise DestinationError, naming all of them, for parameters that no folder can be named after.

    `stems`: parameter to the stems of its files.
    """
    check_named(
        _paths(tag, stems),
        expected="names of parameters that can be folders (zero/<parameter>/<state>.pt)",
        remedy="rename them in the model, or write native files (--to deepspeed), which name no file after a parameter",
        taken=[f"{tag}/zero/{GLOBALS}"],
        faults=[*_states_with_folders(stems), *_nested_in_others(stems)],
    )


def _paths(tag: str, stems: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    for param, own in stems.items():
        for stem in own:
            yield param, state_path(tag, param, stem)


def _states_with_folders(stems: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """States whose file would lie in a folder of its own, where it would be another parameter's."""
    for param, own in stems.items():
        for stem in own:
            if "/" in stem:
                yield param, f"its state {stem!r} has a '/' in its name"


def _nested_in_others(stems: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """Parameters whose folder lies in that of another and is taken for a file of states there."""
    for param in stems:
        parts = param.split("/")
        for count in range(1, len(parts)):
            outer = "/".join(parts[:count])
            if outer in stems and _TAKEN_FOR_STATES.search(parts[count]):
                yield (
                    param,
                    f"DeepSpeed would take the folder {parts[count]!r} in that of {outer!r} for a file of states",
                )


_STATES = {"fp32": WEIGHT}
"""Stem of a file to the name of the state, where they differ."""

_LONGEST = 4096
"""Characters of a path, at most (PATH_MAX of Linux)."""


@dataclass(slots=True)
class ParameterFolders:
    """What lies in `zero/`."""

    states: dict[str, dict[str, StateIndex]] = field(default_factory=dict)
    """Parameter to state name to where it lies."""
    info: dict[str, dict[str, object]] = field(default_factory=dict)
    """Parameter to what its files say beside the tensor (`cat_dim`, `vocab_tensor`, ...)."""
    files: list[tuple[str, str]] = field(default_factory=list)
    """Path and role of every file."""
    records: list[Record] = field(default_factory=list)
    """Checksums of their storages."""
    strays: list[str] = field(default_factory=list)
    """Entries that are no parameter and no state."""


def read_parameter_folders(zero: Path, shapes: Mapping[str, Shape], problems: Problems) -> ParameterFolders:
    """Read every folder of `zero`; files that cannot be read go to `problems`.

    `shapes`: shape of a parameter where the model-states files say it; flat tensors are given that shape. A folder in
    that of a parameter is a parameter only if it is one of these.
    """
    found = ParameterFolders()
    for folder in _folders(zero, shapes, found):
        if "fp32.pt" not in folder.files:
            problems.missing.append(f"zero/{folder.name}/fp32.pt")
        own = dict(_read_folder(folder, shapes.get(folder.name), found, problems))
        found.states[folder.name] = {name: own[name] for name in sorted(own, key=lambda name: name != WEIGHT)}
    return found


@dataclass(frozen=True, slots=True)
class _Folder:
    """The folder of a parameter."""

    path: Path
    """Where it is."""
    name: str
    """Name of the parameter."""
    files: tuple[str, ...]
    """Names of its files, in order."""


def _folders(zero: Path, shapes: Mapping[str, Shape], found: ParameterFolders) -> Iterator[_Folder]:
    """The parameters in `zero`, each before those in its folder, in order; what is none goes to the strays."""
    known = _with_parents(shapes)
    waiting = [""]
    while waiting:
        name = waiting.pop()
        folder = zero / name
        inner, others = _entries(folder, follow_links=not name)
        files = tuple(own for own in others if name and own.endswith(".pt"))
        is_parameter = bool(files) or name in shapes
        below = [f"{name}/{own}" if name else own for own in inner]
        nested = [own for own in below if not is_parameter or own in known]
        if is_parameter or (name and not nested):
            yield _Folder(folder, name, files)
        strays = (own for own in others if not (own.endswith(".pt") if name else own == GLOBALS))
        found.strays += [f"{name}/{own}" if name else own for own in strays]
        found.strays += [own for own in below if is_parameter and own not in known]
        waiting += reversed(nested)


def _entries(folder: Path, *, follow_links: bool) -> tuple[list[str], list[str]]:
    """Names of the folders in a folder, and of everything else, in order."""
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


def _with_parents(names: Iterable[str]) -> set[str]:
    """The folders of parameters, and every folder that holds one."""
    known: set[str] = set()
    for name in names:
        folder = name if len(name) <= _LONGEST else ""
        while folder and folder not in known:
            known.add(folder)
            folder = folder.rpartition("/")[0]
    return known


_UNNAMED = "archive"
"""Name that torch records where it saves to no path."""


def _read_folder(
    folder: _Folder, shape: Shape | None, found: ParameterFolders, problems: Problems
) -> Iterator[tuple[str, StateIndex]]:
    for name in folder.files:
        path = folder.path / name
        where = f"zero/{folder.name}/{name}"
        try:
            archive = read_archive(str(path))
        except (SourceError, CorruptError) as error:
            problems.wrong.append(f"{where}: {str(error).replace(f'{path}: ', '').replace(f'{folder.path}/', '')}")
            continue
        if archive.saved_as not in ("", _UNNAMED, path.stem):
            problems.wrong.append(f"{where}: expected the file that was saved as {name}; got {archive.saved_as}.pt")
        state = _STATES.get(path.stem, path.stem)
        value = archive.root
        if isinstance(value, dict) and "param" in value:
            rest = {str(key): item for key, item in value.items() if key != "param"}
            if rest and state == WEIGHT:
                found.info[folder.name] = rest
            value = value["param"]
        found.files.append((str(path), f"{state} of {folder.name}"))
        found.records += archive.records
        index = _state(state, value, shape)
        if index is None:
            expected = "a number or a tensor" if shape is None else f"a tensor of {list(shape)}"
            problems.wrong.append(f"{where}: expected {expected}; got {described(value)}")
        else:
            yield state, index


def _state(name: str, value: object, shape: Shape | None) -> StateIndex | None:
    """Where a state lies; None when it is no tensor of the parameter and no number."""
    if not isinstance(value, TensorRef) or name == STEP:
        return scalar_state(value)
    ref = value
    if shape is not None and ref.shape != shape:
        shaped = _reshaped(ref, shape)
        if shaped is None and len(ref.shape) < 2:
            return None
        ref = shaped or ref
    return StateIndex.whole(ref)


def _reshaped(ref: TensorRef, shape: Shape) -> TensorRef | None:
    """The same elements as a tensor of `shape`; None when there are more or fewer, or gaps between them."""
    strides = contiguous_strides(shape)
    reshaped = TensorRef(path=ref.path, offset=ref.offset, dtype=ref.dtype, shape=shape, strides=strides)
    return reshaped if ref.is_contiguous and reshaped.numel == ref.numel else None
