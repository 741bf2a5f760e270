"""Which files hold the weights of a Hugging Face model, from names alone.

A user may pass the folder, one file with weights, an index, or the folder of a model in the hub's cache
(`models--org--name/`, whose `refs/main` names a folder of `snapshots/`).

A folder may hold a model in several forms: safetensors come before torch files, as transformers prefers them, and
`model` before the names of other libraries. Where that does not settle it (one file and an index, two variants), the
user has to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from ucp.errors import UnknownFormatError, UsageError, counted, listed
from ucp.io.folder import names_in, short_text
from ucp_formats.huggingface.names import BIN, SAFETENSORS, WeightsName, index_stem, parse_weights

__all__ = ["Form", "Located", "is_weights", "locate", "the_model"]

_STEMS = ("model", "pytorch_model")
"""Names of transformers itself."""
_ADAPTER = "adapter_model"
_SNAPSHOTS = "snapshots"
_MOST_REF = 256


class Form(StrEnum):
    """How a model is cut into files."""

    WHOLE = "one file"
    INDEXED = "files of an index"
    NUMBERED = "numbered files without an index"
    OF_RANKS = "files of ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What a path resolves to."""

    root: Path
    """Folder that the files lie in."""
    form: Form = Form.WHOLE
    """How the model is cut into files."""
    files: tuple[str, ...] = ()
    """Names of the files with weights; of the index alone, where there is one."""
    reasons: tuple[str, ...] = ()
    """What was seen."""
    choices: tuple[str, ...] = ()
    """Files to choose from, where several could be meant."""
    others: tuple[str, ...] = ()
    """Files with weights that are left alone: the model in another form."""
    alone: bool = False
    """Whether the user passed one file, to which the other files of the folder need not belong."""


def locate(path: Path) -> Located | None:
    """Where the model at `path` lies, or None if there is none."""
    if path.is_file():
        return _of_file(path)
    root = _snapshot(path)
    forms = _forms(set(names_in(root)))
    if not forms:
        return None
    first = min(map(_preference, forms))
    found = [own for own in forms if _preference(own) == first]
    every = [name for own in forms for name in own.files]
    if len(found) > 1:
        choices = tuple(own.files[0] for own in found)
        return Located(root=root, choices=choices, reasons=choices[:1])
    others = tuple(name for name in every if name not in found[0].files)
    return Located(root=root, form=found[0].form, files=found[0].files, reasons=found[0].files[:1], others=others)


def _snapshot(path: Path) -> Path:
    """The folder of files that a folder of the hub's cache leads to; `path` itself where it is none."""
    name = short_text(path / "refs" / "main", most_bytes=_MOST_REF)
    snapshots = path / _SNAPSHOTS
    if name and name.isalnum() and (snapshots / name).is_dir():
        return snapshots / name
    return path


def _of_file(path: Path) -> Located | None:
    """The model that one file is, or leads to."""
    own = parse_weights(path.name)
    is_index = index_stem(path.name) is not None
    if path.name.startswith(_ADAPTER) or not (is_index or own is not None or path.suffix == SAFETENSORS):
        return None
    if own is not None and (own.count or 1) > 1:
        return Located(root=path.parent, choices=(str(path.parent),), reasons=(path.name,), alone=True)
    form = Form.INDEXED if is_index else Form.OF_RANKS if own is not None and own.rank is not None else Form.WHOLE
    return Located(root=path.parent, form=form, files=(path.name,), reasons=(path.name,), alone=True)


class _Saved(NamedTuple):
    """A model in one form."""

    stem: str
    """What the names of its files begin with, and the variant."""
    suffix: str
    """What they end with."""
    form: Form
    """How it is cut."""
    files: tuple[str, ...] = ()
    """Names of the files with weights, or of the index alone."""


def _forms(names: Iterable[str]) -> list[_Saved]:
    """Models that files of such names are, each in the forms it is there in."""
    keys = {name: key for name in sorted(names) if (key := index_stem(name)) is not None}
    found = [_Saved(*key, Form.INDEXED, (name,)) for name, key in keys.items() if not key[0].startswith(_ADAPTER)]
    held: dict[_Saved, list[str]] = {}
    for name in sorted(names):
        own = parse_weights(name)
        if own is not None and (_form(own) is not Form.NUMBERED or (own.stem, own.suffix) not in keys.values()):
            held.setdefault(_Saved(own.stem, own.suffix, _form(own)), []).append(name)
    return [*found, *(own._replace(files=tuple(files)) for own, files in held.items())]


def _form(own: WeightsName) -> Form:
    if own.rank is not None:
        return Form.OF_RANKS
    return Form.WHOLE if own.count is None else Form.NUMBERED


def _preference(own: _Saved) -> tuple[bool, bool, bool]:
    return own.suffix == BIN, own.form is Form.NUMBERED, own.stem not in _STEMS


def is_weights(name: str) -> bool:
    """Whether a file of a folder is one with weights, or an index of such."""
    return parse_weights(name) is not None or index_stem(name) is not None


def the_model(located: Located | None, path: Path) -> Located:
    """The model found. Raises UnknownFormatError where there is none, UsageError where there are several."""
    if located is None:
        raise UnknownFormatError(
            f"expected a Hugging Face model at {path}: a folder with model.safetensors, with "
            "model.safetensors.index.json and the files that it names, or with pytorch_model.bin"
        )
    if located.choices and located.alone:
        raise UsageError(f"{path} is one of several files of a model; pass its folder, {located.choices[0]}")
    if located.choices:
        raise UsageError(
            f"{path} holds a model in {counted(len(located.choices), 'form')}, which need not be the same; pass the "
            f"file of the one that is meant:\n{listed(str(located.root / name) for name in located.choices)}"
        )
    return located
