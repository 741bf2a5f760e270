"""Which files hold the weights of a Hugging Face model, from names alone.

A user may pass the folder, one file with weights, an index, or the folder of a model in the hub's cache
(`models--org--name/`, whose `refs/main` names a folder of `snapshots/`).

A folder may hold a model in several forms: safetensors are preferred to torch files, as in transformers, and `model`
to the names of other libraries. If that leaves several (one file and an index, two variants), the user has to choose.

| name | written by |
|---|---|
| model.safetensors | save_pretrained, of one file (transformers 4.29 and later) |
| model-00001-of-00003.safetensors | save_pretrained, of several, with model.safetensors.index.json |
| model.fp16.safetensors, model.safetensors.index.fp16.json | save_pretrained(variant="fp16") |
| pytorch_model.bin, pytorch_model-00001-of-00003.bin | save_pretrained before 4.29, by torch.save |
| shard-00002-model-00001-of-00001.safetensors | HuggingFaceStorageWriter of torch (DCP): rank 1 of a run |
| diffusion_pytorch_model.safetensors, consolidated.safetensors | diffusers, Mistral |
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ucp.contract.locating import Located, Strength, require_checkpoint
from ucp.errors import UsageError, format_count, format_list
from ucp.io.folder import names_in, read_short_text

CONFIG = "config.json"
SAFETENSORS, BIN = ".safetensors", ".bin"

_STEMS = r"(?:model|pytorch_model|diffusion_pytorch_model|consolidated)(?:\.[A-Za-z0-9_]+)?"
_WEIGHTS = re.compile(
    rf"(?:shard-(?P<rank>\d{{5}})-)?(?P<stem>{_STEMS})(?:-(?P<number>\d{{5}})-of-(?P<count>\d{{5}}))?"
    r"(?P<suffix>\.safetensors|\.bin)"
)
_INDEX = re.compile(r"(?P<stem>.+)(?P<suffix>\.safetensors|\.bin)\.index(?P<variant>\.[A-Za-z0-9_]+)?\.json")


@dataclass(frozen=True, slots=True)
class WeightsName:
    """A parsed name of a file with weights."""

    stem: str
    """Its beginning and the variant: "model", "model.fp16"."""
    suffix: str
    """".safetensors" or ".bin"."""
    number: int | None
    """Number of the file, from 1; None for a single file."""
    count: int | None
    """How many files there are; None for a single file."""
    rank: int | None
    """Rank that wrote it; None unless ranks wrote files of their own."""


def parse_weights(name: str) -> WeightsName | None:
    """The parsed file name; None for other names.

    >>> parse_weights("model-00002-of-00003.safetensors")
    WeightsName(stem='model', suffix='.safetensors', number=2, count=3, rank=None)
    >>> parse_weights("shard-00002-model-00001-of-00001.safetensors").rank
    1
    >>> parse_weights("adapter_model.safetensors"), parse_weights("model.gguf")
    (None, None)
    """
    match = _WEIGHTS.fullmatch(name)
    if match is None or (match["suffix"] == BIN and not match["stem"].startswith("pytorch_model")):
        return None
    number, count, rank = (None if text is None else int(text) for text in match.group("number", "count", "rank"))
    return WeightsName(match["stem"], match["suffix"], number, count, None if rank is None else rank - 1)


def index_stem(name: str) -> tuple[str, str] | None:
    """Stem and suffix of the files of an index with this name; None for another name.

    >>> index_stem("model.safetensors.index.fp16.json"), index_stem("config.json")
    (('model.fp16', '.safetensors'), None)
    """
    match = _INDEX.fullmatch(name)
    return None if match is None else (match["stem"] + (match["variant"] or ""), match["suffix"])


_TRANSFORMERS = ("model", "pytorch_model")
"""Stems of transformers itself."""
_ADAPTER = "adapter_model"
_MOST_REF = 256


class Form(StrEnum):
    """How a model is split into files."""

    SINGLE = "one file"
    INDEXED = "files of an index"
    NUMBERED = "numbered files without an index"
    OF_RANKS = "files of ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Files of a model in one form."""

    stem: str = ""
    """Beginning of their names and the variant; empty if the user passed a file."""
    suffix: str = ""
    """Suffix of their names."""
    form: Form = Form.SINGLE
    """How the model is split into files."""
    files: tuple[str, ...] = ()
    """Names of the files with weights; of the index alone, if there is one."""
    others: tuple[str, ...] = ()
    """Files with weights that are not read: the model in another form."""

    @property
    def is_single(self) -> bool:
        """Whether the user passed one file: the other files of its folder may belong to something else."""
        return not self.stem


def locate(path: Path) -> Located[ModelFiles] | None:
    """Where the model at `path` lies, or None if there is none."""
    if path.is_file():
        return _look_at_file(path)
    commit = read_short_text(path / "refs" / "main", most_bytes=_MOST_REF)
    snapshot = path / "snapshots" / commit if commit and commit.isalnum() else path
    root = snapshot if snapshot.is_dir() else path
    models = _models(set(names_in(root)))
    if not models:
        return None
    best = min(map(_preference, models))
    model, *equals = (model for model in models if _preference(model) == best)
    choices = tuple(files.files[0] for files in (model, *equals)) if equals else ()
    others = tuple(name for files in models for name in files.files if name not in model.files)
    return _to_model_files(root, replace(model, others=others), choices)


def _to_model_files(root: Path, model: ModelFiles, choices: tuple[str, ...] = ()) -> Located[ModelFiles]:
    return Located(root=root, content=model, reasons=model.files[:1], choices=choices, strength=Strength.WEIGHTS)


def _look_at_file(path: Path) -> Located[ModelFiles] | None:
    """The model that one file is, or leads to."""
    name = parse_weights(path.name)
    is_index = index_stem(path.name) is not None
    if path.name.startswith(_ADAPTER) or not (is_index or name is not None or path.suffix == SAFETENSORS):
        return None
    form = Form.INDEXED if is_index else Form.SINGLE if name is None else _form(name)
    is_part = name is not None and (name.count or 1) > 1
    model = ModelFiles(form=Form.SINGLE if form is Form.NUMBERED else form, files=(path.name,))
    return _to_model_files(path.parent, model, (path.name,) if is_part else ())


def _models(names: Iterable[str]) -> list[ModelFiles]:
    """Models in a folder with these names, once for each form."""
    indexes = {name: key for name in sorted(names) if (key := index_stem(name)) is not None}
    models = [
        ModelFiles(stem=stem, suffix=suffix, form=Form.INDEXED, files=(name,))
        for name, (stem, suffix) in indexes.items()
        if not stem.startswith(_ADAPTER)
    ]
    groups: dict[tuple[str, str, Form], list[str]] = {}
    for name in sorted(names):
        parts = parse_weights(name)
        if parts is None or (_form(parts) is Form.NUMBERED and (parts.stem, parts.suffix) in indexes.values()):
            continue  # no weights, or weights that an index lists
        groups.setdefault((parts.stem, parts.suffix, _form(parts)), []).append(name)
    for (stem, suffix, form), files in groups.items():
        models.append(ModelFiles(stem=stem, suffix=suffix, form=form, files=tuple(files)))
    return models


def _form(name: WeightsName) -> Form:
    if name.rank is not None:
        return Form.OF_RANKS
    return Form.SINGLE if name.count is None else Form.NUMBERED


def _preference(model: ModelFiles) -> tuple[bool, bool, bool]:
    return model.suffix == BIN, model.form is Form.NUMBERED, model.stem not in _TRANSFORMERS


def is_weights(name: str) -> bool:
    """Whether it is the name of a file with weights, or of an index."""
    return parse_weights(name) is not None or index_stem(name) is not None


def check_model(located: Located[ModelFiles] | None, path: Path) -> Located[ModelFiles]:
    """`located`, if it is one model. Raises UnknownFormatError if there is none, UsageError if there are several."""
    if located is not None and located.choices and located.content.is_single:
        raise UsageError(f"{path} is one of several files of a model; pass its folder, {located.root}")
    if located is not None and located.choices:
        raise UsageError(
            f"{path} holds a model in {format_count(len(located.choices), 'form')}, which may differ; pass the file of "
            f"the right one:\n{format_list(str(located.root / name) for name in located.choices)}"
        )
    example = (
        "a folder with model.safetensors, with model.safetensors.index.json and the files that it names, or with "
        "pytorch_model.bin"
    )
    return require_checkpoint(located, path, "a Hugging Face model", example)
