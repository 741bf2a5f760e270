"""The tensors of a Hugging Face model, read from the headers of its files.

1. List the files: a single one, those that an index names, numbered ones, or those of ranks.
2. Read the header of each (safetensors), or the pickle, which is never executed (torch).
3. Compare them with the index. Join shards of ranks by the offsets that each file records (`DCP_SHARDING_INFO`; torch
   2.13, distributed/checkpoint/hf_storage.py): a tensor ends where the last of its shards does.

All problems are reported at once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ucp.contract.output_names import shorter
from ucp.contract.ranks import Problems
from ucp.core.index import StateIndex
from ucp.core.region import Box
from ucp.core.tensor import DType, Record, TensorRef
from ucp.core.union import state_of_boxes
from ucp.errors import (
    CorruptError,
    MalformedError,
    MissingFileError,
    SourceError,
    UnsupportedError,
    format_count,
    format_list,
)
from ucp.io.folder import names_in, to_absolute
from ucp.io.json_text import parsed
from ucp.io.pickle.fields import describe_value
from ucp.io.safetensors import read_header, read_weight_map
from ucp.io.torch_file.archive import read_archive
from ucp_formats.huggingface.locate import BIN, Form, ModelFiles, parse_weights

_OFFSETS = "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """The tensors of all files."""

    tensors: Mapping[str, StateIndex]
    """Tensors by name, in the order of the files."""
    files: Sequence[str]
    """Names of the files with tensors."""
    records: tuple[Record, ...]
    """Checksums (torch files)."""
    ranks: int = 1
    """Ranks that wrote files of their own."""


@dataclass(frozen=True, slots=True)
class _WeightsFile:
    """The tensors of one file."""

    tensors: Mapping[str, TensorRef]
    metadata: Mapping[str, str] = field(default_factory=dict)
    records: tuple[Record, ...] = ()


def read_weights(folder: Path, model: ModelFiles) -> ModelWeights:
    """The tensors of a model in `folder`.

    Raises MissingFileError, MalformedError or UnsupportedError with all problems of its files.
    """
    problems = Problems()
    root = to_absolute(folder)
    places = read_weight_map(os.path.join(root, model.files[0])) if model.form is Form.INDEXED else None
    names = _file_names(folder, model, places, problems)
    results = ((name, _try_read(os.path.join(root, name), problems)) for name in names)
    files = {name: file for name, file in results if file is not None}
    if places is not None:
        _check_index(model.files[0], places, files, problems)
    ranks = 1
    if model.form is Form.OF_RANKS:
        ranks += max(parsed_name.rank or 0 for name in names if (parsed_name := parse_weights(name)) is not None)
        tensors = _join_shards(files, problems)
    else:
        tensors = _collect_tensors(files, problems)
    problems.raise_any(root, f"a Hugging Face model, {model.form}")
    records = tuple(record for file in files.values() for record in file.records)
    return ModelWeights(tensors=tensors, files=names, records=records, ranks=ranks)


def second_names(tensors: Mapping[str, StateIndex]) -> dict[str, str]:
    """Second name of a tensor to its first: torch files keep a shared storage once."""
    firsts: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if len(tensor.fragments) == 1 and tensor.numel:
            first = firsts.setdefault(tensor.fragments[0].ref, name)
            if first != name:
                aliases[name] = first
    return aliases


def _file_names(folder: Path, model: ModelFiles, places: Mapping[str, str] | None, problems: Problems) -> list[str]:
    """Files with tensors; those that are not there are problems."""
    if places is not None:
        counts = Counter(places.values())
        present = counts.keys() & set(names_in(folder))
        for name in sorted(counts.keys() - present):
            problems.missing.append(f"{shorter(name)}, which {model.files[0]} names for {counts[name]:,} tensors")
        return sorted(present)
    if model.form in (Form.NUMBERED, Form.OF_RANKS):
        problems.missing.extend(_missing_files(model.files))
    return list(model.files)


def _missing_files(files: Sequence[str]) -> Iterable[str]:
    """Names of numbered files, or of files of ranks, that are missing."""
    names = [parts for name in files if (parts := parse_weights(name)) is not None]
    counts = sorted({parts.count for parts in names if parts.count is not None})
    if len(counts) > 1:
        yield f"an index: the files are numbered of {' and of '.join(map(str, counts))}, so they are from several saves"
        return
    first = names[0]
    if first.rank is None:
        for number in sorted(set(range(1, (first.count or 0) + 1)) - {parts.number for parts in names}):
            yield f"{first.stem}-{number:05}-of-{first.count:05}{first.suffix}"
    else:
        ranks = {parts.rank or 0 for parts in names}
        for rank in sorted(set(range(max(ranks))) - ranks):
            yield f"shard-{rank + 1:05}-{first.stem}-*{first.suffix}"


def _try_read(path: str, problems: Problems) -> _WeightsFile | None:
    """The tensors of a file; None if it cannot be read, which is added to `problems`."""
    try:
        if path.endswith(BIN):
            return _read_bin(path)
        header = read_header(path)
        if header.tensors and all(_is_patch(ref, header.metadata.get(name)) for name, ref in header.tensors.items()):
            problems.wrong.append(f"{path}: expected tensors; these are patches of a delta, whose index is missing")
        return _WeightsFile(header.tensors, header.metadata)
    except MissingFileError as error:
        problems.missing.append(str(error))
    except UnsupportedError as error:
        problems.unsupported.append(str(error))
    except (SourceError, CorruptError) as error:
        problems.wrong.append(str(error))
    return None


def _is_patch(ref: TensorRef, checksum: str | None) -> bool:
    """Whether a tensor is a compressed patch: bytes, with the checksum of the tensor that it changes."""
    return checksum is not None and ref.dtype is DType.UINT8 and len(ref.shape) == 1


def _read_bin(path: str) -> _WeightsFile:
    archive = read_archive(path)
    if not isinstance(archive.root, dict):
        raise MalformedError(f"{path}: expected the state dict of a model; got {describe_value(archive.root)}")
    odd = [
        f"{key!r}: {describe_value(value)}" for key, value in archive.root.items() if not isinstance(value, TensorRef)
    ]
    if odd:
        raise MalformedError(
            f"{path}: expected the state dict of a model, names to tensors; got also\n{format_list(odd, most=5)}\n"
            "Nothing in it was executed"
        )
    tensors = {str(name): ref for name, ref in archive.root.items() if isinstance(ref, TensorRef)}
    return _WeightsFile(tensors, records=archive.records)


def _check_index(index: str, places: Mapping[str, str], files: Mapping[str, _WeightsFile], problems: Problems) -> None:
    """Note where an index and the files that it names contradict each other."""
    for name, file in places.items():
        if file in files and name not in files[file].tensors:
            problems.wrong.append(f"{file}: lacks {name}, which {index} says that it holds")
    for file, weights in files.items():
        unknown = (name for name in weights.tensors if name not in places)
        problems.wrong += [f"{file}: holds {name}, which {index} does not name" for name in unknown]


def _collect_tensors(files: Mapping[str, _WeightsFile], problems: Problems) -> dict[str, StateIndex]:
    tensors: dict[str, StateIndex] = {}
    file_of: dict[str, str] = {}
    for file, weights in files.items():
        for name, ref in weights.tensors.items():
            if name in tensors:
                problems.wrong.append(f"{file}: holds {name}, as {file_of[name]} does")
                continue
            file_of[name] = file
            tensors[name] = StateIndex.from_tensor(ref)
    return tensors


def _join_shards(files: Mapping[str, _WeightsFile], problems: Problems) -> dict[str, StateIndex]:
    """Tensors from the shards that ranks wrote. If several ranks hold the same shard, one of them wrote it."""
    shards: dict[str, dict[Box, TensorRef]] = {}
    copies: Counter[tuple[str, str]] = Counter()
    for file, weights in files.items():
        try:
            offsets = _parse_offsets(weights)
        except ValueError as error:
            problems.wrong.append(f"{file}: expected {_OFFSETS} of every tensor in its metadata; {error}")
            continue
        for name, ref in weights.tensors.items():
            box = Box(offsets[name], ref.shape)
            first = shards.setdefault(name, {}).setdefault(box, ref)
            if first is not ref and box.numel:
                copies[file, os.path.basename(first.path)] += 1
    for (file, other), count in copies.items():
        problems.wrong.append(
            f"{file}: holds shards of {format_count(count, 'tensor')} that {other} holds too; torch saves each shard "
            "once, so one file is a copy of the other, or is from another save"
        )
    tensors = {}
    for name, boxes in shards.items():
        if len({(len(ref.shape), ref.dtype) for ref in boxes.values()}) > 1:
            problems.wrong.append(f"{name}: shards of several types or numbers of dims")
            continue
        shape = tuple(map(max, zip(*(box.stops for box in boxes), strict=True)))
        pieces = [(box, ref) for box, ref in boxes.items() if box.numel] or list(boxes.items())[:1]
        tensors[name] = state_of_boxes(pieces[0][1].dtype, shape, pieces)
    return tensors


def _parse_offsets(file: _WeightsFile) -> dict[str, tuple[int, ...]]:
    """Where the shards of tensors in a file begin. Raises ValueError."""
    document = parsed(file.metadata.get(_OFFSETS, "null").encode())
    by_name = document if isinstance(document, dict) else {}
    offsets: dict[str, tuple[int, ...]] = {}
    for name, ref in file.tensors.items():
        match by_name.get(name):
            case {"saved_offsets": list(starts)} if len(starts) == len(ref.shape) and all(
                type(start) is int and 0 <= start < 1 << 60 for start in starts
            ):
                offsets[name] = tuple(starts)
            case other:
                raise ValueError(f"got {describe_value(other)} of {name}")
    return offsets
