"""The tensors of a Hugging Face model, read from the indexes of its files.

1. Say which files there are: the one, those that the index names, those whose numbers say how many they are, or those
   of ranks.
2. Read the header of each (safetensors), or the pickle, which is never executed (torch).
3. Compare what they hold with what the index says, and put the parts that ranks wrote together by the offsets that
   each file records (`DCP_SHARDING_INFO`; torch 2.13, distributed/checkpoint/hf_storage.py): a tensor ends where the
   last of its parts does.

Everything that is wrong is told at once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ucp.contract.output_names import shorter
from ucp.contract.ranks import Problems
from ucp.core.index import Fragment
from ucp.core.region import Box
from ucp.core.tensor import Record, TensorRef
from ucp.errors import CorruptError, MalformedError, MissingFileError, SourceError, UnsupportedError, counted, listed
from ucp.io.folder import names_in, to_absolute
from ucp.io.json_text import parsed
from ucp.io.pickle.fields import described
from ucp.io.safetensors import read_header, read_weight_map
from ucp.io.torch_file.archive import read_archive
from ucp_formats.huggingface.locate import BIN, Form, Model, parse_weights

_OFFSETS = "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor as the files hold it."""

    shape: tuple[int, ...]
    """Elements per dim of the whole."""
    fragments: tuple[Fragment, ...]
    """Its parts."""


@dataclass(slots=True, kw_only=True)
class Weights:
    """What the files hold."""

    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    """Tensors by name, in the order of the files."""
    files: list[str] = field(default_factory=list)
    """Names of the files with tensors."""
    records: list[Record] = field(default_factory=list)
    """Checksums (torch files)."""
    ranks: int = 1
    """Ranks that wrote files of their own."""


@dataclass(frozen=True, slots=True)
class _File:
    """What one file holds."""

    tensors: Mapping[str, TensorRef]
    metadata: Mapping[str, str] = field(default_factory=dict)
    records: tuple[Record, ...] = ()


def read_weights(folder: Path, model: Model) -> Weights:
    """The tensors of a model in `folder`.

    Raises MissingFileError, MalformedError or UnsupportedError with everything wrong with its files.
    """
    problems = Problems()
    root = to_absolute(folder)
    places = read_weight_map(os.path.join(root, model.files[0])) if model.form is Form.INDEXED else None
    names = _file_names(folder, model, places, problems)
    found = {name: own for name in names if (own := _try(os.path.join(root, name), name, problems)) is not None}
    if places is not None:
        _check_index(model.files[0], places, found, problems)
    weights = Weights(files=names, records=[record for own in found.values() for record in own.records])
    if model.form is Form.OF_RANKS:
        weights.ranks = 1 + max(parts.rank or 0 for name in names if (parts := parse_weights(name)) is not None)
        weights.tensors = _joined(found, problems)
    else:
        weights.tensors = _whole(found, problems)
    problems.raise_any(root, f"a Hugging Face model, {model.form}")
    return weights


def second_names(tensors: Mapping[str, SavedTensor]) -> dict[str, str]:
    """Names of tensors that lie where another lies, with the name of that: torch files keep a storage once."""
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if len(tensor.fragments) != 1 or not tensor.fragments[0].box.numel:
            continue
        other = first.setdefault(tensor.fragments[0].ref, name)
        if other != name:
            aliases[name] = other
    return aliases


def _file_names(folder: Path, model: Model, places: Mapping[str, str] | None, problems: Problems) -> list[str]:
    """Files with tensors; those that should be there and are not are problems."""
    if places is not None:
        every = sorted(set(places.values()))
        counts = Counter(places.values())
        beside = set(names_in(folder))
        there = [name for name in every if name in beside]
        for name in sorted(set(every) - set(there)):
            problems.missing.append(f"{shorter(name)}, which {model.files[0]} names for {counts[name]:,} tensors")
        return there
    if model.form in (Form.NUMBERED, Form.OF_RANKS):
        problems.missing.extend(_missing(model.files))
    return list(model.files)


def _missing(files: Sequence[str]) -> Iterable[str]:
    """Names of numbered files, or of ranks, that are not among those there."""
    parts = [own for name in files if (own := parse_weights(name)) is not None]
    counts = sorted({own.count for own in parts if own.count is not None})
    if len(counts) > 1:
        yield f"an index: there are files of {' and of '.join(map(str, counts))}, of several saves"
        return
    numbers = {own.number for own in parts}
    ranks = {own.rank for own in parts}
    first = parts[0]
    if first.rank is None:
        for number in range(1, (first.count or 0) + 1):
            if number not in numbers:
                yield f"{first.stem}-{number:05}-of-{first.count:05}{first.suffix}"
    for rank in range(max(own or 0 for own in ranks)):
        if first.rank is not None and rank not in ranks:
            yield f"shard-{rank + 1:05}-{first.stem}-*{first.suffix}"


def _try(path: str, name: str, problems: Problems) -> _File | None:
    """What a file holds, or None and a problem."""
    try:
        if name.endswith(BIN):
            return _read_bin(path)
        header = read_header(path)
        return _File(header.tensors, header.metadata)
    except MissingFileError as error:
        problems.missing.append(str(error))
    except UnsupportedError as error:
        problems.unsupported.append(str(error))
    except (SourceError, CorruptError) as error:
        problems.wrong.append(str(error))
    return None


def _read_bin(path: str) -> _File:
    archive = read_archive(path)
    if not isinstance(archive.root, dict):
        raise MalformedError(f"{path}: expected the state dict of a model; got {described(archive.root)}")
    odd = [f"{key!r}: {described(own)}" for key, own in archive.root.items() if not isinstance(own, TensorRef)]
    if odd:
        raise MalformedError(
            f"{path}: expected the state dict of a model, names to tensors; got also\n{listed(odd, most=5)}\n"
            "Nothing in it was executed"
        )
    tensors = {str(name): own for name, own in archive.root.items() if isinstance(own, TensorRef)}
    return _File(tensors, records=archive.records)


def _check_index(index: str, places: Mapping[str, str], found: Mapping[str, _File], problems: Problems) -> None:
    """Note where an index and the files that it names say otherwise."""
    for name, file in places.items():
        if file in found and name not in found[file].tensors:
            problems.wrong.append(f"{file}: lacks {name}, which {index} says that it holds")
    for file, own in found.items():
        for name in own.tensors:
            if name not in places:
                problems.wrong.append(f"{file}: holds {name}, which {index} does not name")


def _whole(found: Mapping[str, _File], problems: Problems) -> dict[str, SavedTensor]:
    tensors: dict[str, SavedTensor] = {}
    held_in: dict[str, str] = {}
    for file, own in found.items():
        for name, ref in own.tensors.items():
            if name in tensors:
                problems.wrong.append(f"{file}: holds {name}, as {held_in[name]} does")
                continue
            held_in[name] = file
            tensors[name] = SavedTensor(shape=ref.shape, fragments=(Fragment(box=Box.full(ref.shape), ref=ref),))
    return tensors


def _joined(found: Mapping[str, _File], problems: Problems) -> dict[str, SavedTensor]:
    """Tensors of the parts that ranks wrote. Where ranks hold one part, DCP has one of them write it."""
    parts: dict[str, dict[Box, TensorRef]] = {}
    copies: Counter[tuple[str, str]] = Counter()
    for file, own in found.items():
        try:
            offsets = _offsets(own)
        except ValueError as error:
            problems.wrong.append(f"{file}: expected {_OFFSETS} of every tensor in its metadata; {error}")
            continue
        for name, ref in own.tensors.items():
            box = Box(offsets[name], ref.shape)
            first = parts.setdefault(name, {}).setdefault(box, ref)
            if first is not ref and box.numel:
                copies[file, os.path.basename(first.path)] += 1
    for (file, other), count in copies.items():
        problems.wrong.append(
            f"{file}: holds parts of {counted(count, 'tensor')} that {other} holds too; torch saves each part once, so "
            "one file is a copy of the other, or of another save"
        )
    return {name: tensor for name, own in parts.items() if (tensor := _tensor(name, own, problems)) is not None}


def _tensor(name: str, parts: Mapping[Box, TensorRef], problems: Problems) -> SavedTensor | None:
    """A tensor from its parts; None and a problem where they are not of one tensor."""
    if len({(len(ref.shape), ref.dtype) for ref in parts.values()}) > 1:
        problems.wrong.append(f"{name}: parts of several types or numbers of dims")
        return None
    fragments = [Fragment(box=box, ref=ref) for box, ref in parts.items()]
    shape = tuple(map(max, zip(*(box.stops for box in parts), strict=True)))
    return SavedTensor(shape=shape, fragments=tuple([own for own in fragments if own.box.numel] or fragments[:1]))


def _offsets(file: _File) -> dict[str, tuple[int, ...]]:
    """Where the parts of tensors in a file begin. Raises ValueError."""
    said = parsed(file.metadata.get(_OFFSETS, "null").encode())
    by_name = said if isinstance(said, dict) else {}
    offsets: dict[str, tuple[int, ...]] = {}
    for name, ref in file.tensors.items():
        match by_name.get(name):
            case {"saved_offsets": list(own)} if len(own) == len(ref.shape) and all(
                type(n) is int and 0 <= n < 1 << 60 for n in own
            ):
                offsets[name] = tuple(own)
            case other:
                raise ValueError(f"got {described(other)} of {name}")
    return offsets
