"""Metadata that every rank of a run wrote for itself (`use_collectives=False`), as those of one checkpoint.

    __0.metadata      what rank 0 saved: its own parts, and copies of what other ranks have too
    __0_0.distcp      its items

>>> local_files(["__1.metadata", "__0_0.distcp", ".metadata"])
{1: '__1.metadata'}
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ucp.errors import MissingFileError, listed
from ucp.io.dcp.items import of_other_saves
from ucp.io.dcp.metadata import DcpMetadata, ItemPlace, SavedTensor, read_metadata
from ucp.io.folder import names_of_folder

__all__ = ["local_files", "merged", "rank_of", "read_local"]

_LOCAL = re.compile(r"__(\d+)\.metadata")
"""`__3.metadata`: of rank 3."""
_ITEMS = re.compile(r"__(\d+)_\d+\.distcp")
"""`__3_0.distcp`: the first file of rank 3."""


def local_files(names: Iterable[str]) -> dict[int, str]:
    """Rank to the name of its metadata, in the order of the ranks."""
    return dict(sorted((int(found[1]), name) for name in names if (found := _LOCAL.fullmatch(name))))


def rank_of(name: str) -> int | None:
    """Rank that wrote a file of items; None for another name.

    >>> rank_of("__3_0.distcp"), rank_of("other.distcp")
    (3, None)
    """
    found = _ITEMS.fullmatch(name)
    return None if found is None else int(found[1])


def read_local(folder: str) -> dict[str, DcpMetadata]:
    """Name of each rank's metadata to what it says. Raises MissingFileError with all that are not there."""
    names = names_of_folder(folder)
    files = local_files(names)
    saved = {rank for name in names if (rank := rank_of(name)) is not None}
    missing = sorted((saved | set(range(max(files) + 1))) - files.keys())
    if missing:
        raise MissingFileError(
            f"expected the metadata of every rank in {folder}, as each wrote its own; copy what is missing:\n"
            f"{listed((f'__{rank}.metadata' for rank in missing), most=100)}"
        )
    return {name: read_metadata(os.path.join(folder, name)) for name in files.values()}


def merged(folder: str, parts: Mapping[str, DcpMetadata]) -> DcpMetadata:
    """One for all: chunks of all ranks, and of objects that several have the first.

    Raises MalformedError where a rank describes a key otherwise than others do.
    """
    tensors: dict[str, SavedTensor] = {}
    objects: dict[str, ItemPlace] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, part in parts.items():
        for key, own in part.tensors.items():
            known = tensors.setdefault(key, own)
            if (known.shape, known.dtype) != (own.shape, own.dtype):
                forms = f"{known.dtype} {list(known.shape)} by other ranks, {own.dtype} {list(own.shape)}"
                raise of_other_saves(folder, {name: f"{key} is {forms} here"})
            if known is not own:
                tensors[key] = known._replace(chunks=known.chunks + own.chunks)
        objects = {**part.objects, **objects}
        for key, path in part.paths.items():
            if paths.setdefault(key, path) != path:
                others = f"{paths[key]} by other ranks, {path}"
                raise of_other_saves(folder, {name: f"the path of {key} is {others} here"})
    return replace(next(iter(parts.values())), tensors=tensors, objects=objects, paths=paths)
