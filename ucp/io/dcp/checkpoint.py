"""Reads a folder of torch.distributed.checkpoint: tensors as chunks of references, and objects. No tensor is read.

    .metadata            names the tensors and objects, with the file and bytes of each item
    __<rank>_<n>.distcp  items, one after another; each is a complete file of torch.save
    __<rank>.metadata    in place of `.metadata`, if each rank wrote its part (`use_collectives=False`); replicated
                         entries are in several of them

Only files that `.metadata` refers to are opened: a folder may contain stale files of an earlier, larger run.

>>> read_dcp("nowhere")
Traceback (most recent call last):
ucp.errors.MissingFileError: expected a file at nowhere/.metadata; nothing is there. Check the path, or copy it
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple

from ucp.core.tensor import Record, TensorRef, contiguous_strides
from ucp.errors import MissingFileError, format_count, format_list
from ucp.io.dcp.items import check_files, mixed_saves_error, read_items
from ucp.io.dcp.metadata import METADATA, DcpMetadata, ItemPlace, SavedTensor, read_metadata
from ucp.io.dcp.template import Item
from ucp.io.folder import exists, names_of_folder, path_of


class StoredChunk(NamedTuple):
    """A stored box of a tensor. Offsets and sizes are those of the metadata, which may extend past the tensor."""

    offsets: tuple[int, ...]
    """First element, per dim."""
    sizes: tuple[int, ...]
    """Elements, per dim."""
    ref: TensorRef
    """The stored elements; its shape is `sizes`."""


class StoredTensor(NamedTuple):
    """A tensor and its chunks."""

    saved: SavedTensor
    """The tensor as the metadata describes it."""
    chunks: tuple[StoredChunk, ...]
    """Its chunks, in the order of the metadata."""
    records: tuple[Record, ...]
    """Checksums of the chunks, where recorded."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that is not a tensor."""

    value: object
    """Plain values, stubs and tensor references."""
    records: tuple[Record, ...]
    """Checksums of the tensors in it, where recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dcp:
    """A checkpoint whose metadata has been read and whose files are there."""

    folder: str
    """Absolute path."""
    metadata: DcpMetadata
    """What `.metadata` says."""
    files: Mapping[str, int]
    """Files that it refers to: relative name to bytes."""
    parts: Mapping[str, DcpMetadata]
    """The metadata files by name: `.metadata`, or one per rank."""

    def path(self, file: str) -> str:
        """Absolute path of one of `files`."""
        return os.path.join(self.folder, file)

    def tensors(self, keys: Iterable[str]) -> dict[str, StoredTensor]:
        """Locate the chunks of the tensors named `keys`.

        Raises
        ------
        MalformedError
            An item is damaged, or is not the tensor that the metadata describes; all are named.
        """
        saved = [self.metadata.tensors[key] for key in keys]
        places = [chunk.place for tensor in saved for chunk in tensor.chunks]
        kinds = [(tensor.dtype.value, chunk.sizes) for tensor in saved for chunk in tensor.chunks]
        items = iter(read_items(self.folder, places, kinds))
        wrong: dict[str, list[str]] = {}
        tensors = {
            tensor.key: _to_stored_tensor(tensor, [*islice(items, len(tensor.chunks))], wrong) for tensor in saved
        }
        if wrong:
            raise mixed_saves_error(
                self.folder,
                {
                    file: f"{format_count(len(messages), 'item')} other than .metadata describes, such as {messages[0]}"
                    for file, messages in wrong.items()
                },
            )
        return tensors

    def objects(self, places: Mapping[str, ItemPlace]) -> dict[str, StoredObject]:
        """Read the objects at `places`, by key. Raises MalformedError naming all that cannot be read."""
        items = read_items(self.folder, list(places.values()))
        return {key: StoredObject(item.root, item.records) for key, item in zip(places, items, strict=True)}


def read_dcp(folder: str) -> Dcp:
    """Read the metadata of the checkpoint in `folder`, and check that its files are there.

    Raises
    ------
    MissingFileError
        Metadata, or files that it refers to, are missing; all are named.
    MalformedError
        The metadata cannot be read, or files are truncated.
    UnsupportedError
        Items are transformed, or of an unknown dtype.
    """
    if (
        not exists(os.path.join(folder, METADATA))
        and path_of(folder).is_dir()
        and find_local_files(names_of_folder(folder))
    ):
        parts = _read_local(folder)
        metadata = _merge_ranks(folder, parts)
    else:
        metadata = read_metadata(os.path.join(folder, METADATA))
        parts = {METADATA: metadata}
    places = (place for part in parts.values() for place in part.places())
    return Dcp(folder=folder, metadata=metadata, files=check_files(folder, places), parts=parts)


_LOCAL = re.compile(r"__(\d+)\.metadata")
"""`__3.metadata`: of rank 3."""
_ITEMS = re.compile(r"__(\d+)_\d+\.distcp")
"""`__3_0.distcp`: the first file of rank 3."""


def find_local_files(names: Iterable[str]) -> dict[int, str]:
    """Rank to the name of its metadata file, in the order of the ranks."""
    return dict(sorted((int(match[1]), name) for name in names if (match := _LOCAL.fullmatch(name))))


def parse_rank(name: str) -> int | None:
    """Rank that wrote a file of items; None for another name.

    >>> parse_rank("__3_0.distcp"), parse_rank("other.distcp")
    (3, None)
    """
    match = _ITEMS.fullmatch(name)
    return None if match is None else int(match[1])


def _read_local(folder: str) -> dict[str, DcpMetadata]:
    """Read the metadata of each rank, by file name. Raises MissingFileError naming all missing files."""
    names = names_of_folder(folder)
    files = find_local_files(names)
    saved = {rank for name in names if (rank := parse_rank(name)) is not None}
    missing = sorted((saved | set(range(max(files) + 1))) - files.keys())
    if missing:
        raise MissingFileError(
            f"expected the metadata of every rank in {folder}, as each wrote its own; copy what is missing:\n"
            f"{format_list((f'__{rank}.metadata' for rank in missing), most=100)}"
        )
    return {name: read_metadata(os.path.join(folder, name)) for name in files.values()}


def _merge_ranks(folder: str, parts: Mapping[str, DcpMetadata]) -> DcpMetadata:
    """Merge the metadata of ranks: the chunks of all, and the first copy of each object.

    Raises MalformedError if ranks describe a key differently.
    """
    tensors: dict[str, SavedTensor] = {}
    objects: dict[str, ItemPlace] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, part in parts.items():
        for key, tensor in part.tensors.items():
            known = tensors.setdefault(key, tensor)
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                forms = f"{known.dtype} {list(known.shape)} by other ranks, {tensor.dtype} {list(tensor.shape)}"
                raise mixed_saves_error(folder, {name: f"{key} is {forms} here"})
            if known is not tensor:
                tensors[key] = known._replace(chunks=known.chunks + tensor.chunks)
        objects = {**part.objects, **objects}
        for key, path in part.paths.items():
            if paths.setdefault(key, path) != path:
                others = f"{paths[key]} by other ranks, {path}"
                raise mixed_saves_error(folder, {name: f"the path of {key} is {others} here"})
    return replace(next(iter(parts.values())), tensors=tensors, objects=objects, paths=paths)


def _to_stored_tensor(saved: SavedTensor, items: Sequence[Item], wrong: dict[str, list[str]]) -> StoredTensor:
    chunks = []
    for (offsets, sizes, place), (ref, _) in zip(saved.chunks, items, strict=True):
        if type(ref) is TensorRef and ref.dtype is saved.dtype:
            is_squeezed = [n for n in ref.shape if n != 1] == [n for n in sizes if n != 1] and ref.is_contiguous
            if ref.shape == sizes or is_squeezed:  # the same elements with dims of one element more or fewer
                fitted = ref if ref.shape == sizes else replace(ref, shape=sizes, strides=contiguous_strides(sizes))
                chunks.append(StoredChunk(offsets, sizes, fitted))
                continue
        got = f"{ref.dtype} {list(ref.shape)}" if type(ref) is TensorRef else f"a {type(ref).__name__}"
        text = f"{saved.key} at {list(offsets)}: expected {saved.dtype} {list(sizes)}; got {got}"
        wrong.setdefault(place.file, []).append(text)
    records = items[0].records if len(items) == 1 else tuple(chain.from_iterable([item.records for item in items]))
    return StoredTensor(saved, tuple(chunks), records)
