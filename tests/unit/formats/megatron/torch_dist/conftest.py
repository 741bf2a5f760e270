"""Kept torch_dist checkpoints of megatron-core, taken apart to be changed and saved again."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from ucp_formats.megatron.source import MegatronFormat

from tests.golden.truth import FIXTURES, load_stubbed, read_states
from ucp.core.gaps import check_cover
from ucp.core.index import Index

STATES = ("param", "exp_avg", "exp_avg_sq")
Chunks = list[tuple[tuple[int, ...], Tensor]]


_KEPT_ITEMS: dict[int, bytes] = {}
"""Identity of a tensor of a kept checkpoint to its item, as it was saved."""


@cache
def _read_items(root: Path) -> tuple[dict[str, tuple[tuple[int, ...], Chunks]], dict[str, bytes]]:
    tensors: dict[str, tuple[tuple[int, ...], Chunks]] = {}
    objects: dict[str, bytes] = {}
    metadata = pickle.loads((root / ".metadata").read_bytes())
    files = {path.name: path.read_bytes() for path in root.glob("*.distcp")}
    for index, place in metadata.storage_data.items():
        item = files[place.relative_path][place.offset : place.offset + place.length]
        if index.offset is None:
            objects[index.fqn] = item
        else:
            tensor = torch.load(io.BytesIO(item))
            _KEPT_ITEMS[id(tensor)] = item
            _, chunks = tensors.setdefault(index.fqn, (tuple(metadata.state_dict_metadata[index.fqn].size), []))
            chunks.append((tuple(index.offset), tensor))
    return tensors, objects


def _pickled(tensor: Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor.clone(), stream)
    return stream.getvalue()


class KeptDist:
    """The Llama of the fixtures: keys to chunks, objects as they were pickled, and the common state."""

    def __init__(self, case: str) -> None:
        root = next((FIXTURES / "megatron" / case / "checkpoint").glob("iter_*"))
        self.common: dict[str, Any] = load_stubbed(root / "common.pt")
        self.backend = (root / "metadata.json").read_text()
        self.mcore_data: dict[str, Any] = {}
        tensors, objects = _read_items(root)
        self.objects = {**objects}
        self.tensors = {key: (shape, [*chunks]) for key, (shape, chunks) in tensors.items()}

    @property
    def arguments(self) -> dict[str, Any]:
        return vars(self.common["args"])

    @property
    def groups(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.common["optimizer"]["optimizer"]["param_groups"]
        return found

    def select(self, is_kept: Callable[[str], bool]) -> None:
        """Leave out all other tensors."""
        self.tensors = {key: value for key, value in self.tensors.items() if is_kept(key)}

    def map_chunks(self, key: str, change: Callable[[Tensor], Tensor]) -> None:
        shape, chunks = self.tensors[key]
        self.tensors[key] = (shape, [(offsets, change(chunk)) for offsets, chunk in chunks])

    def save(self, folder: Path) -> Path:
        """Write the folder, with one file of items, and return it."""
        root = folder / "iter_0000010"
        root.mkdir(parents=True)
        kinds: dict[str, Any] = {}
        items: list[tuple[MetadataIndex, bytes]] = []
        for key, (shape, chunks) in self.tensors.items():
            boxes = [ChunkStorageMetadata(torch.Size(offsets), chunk.shape) for offsets, chunk in chunks]
            kinds[key] = TensorStorageMetadata(TensorProperties(dtype=chunks[0][1].dtype), torch.Size(shape), boxes)
            for offsets, chunk in chunks:
                items.append((MetadataIndex(key, torch.Size(offsets)), _KEPT_ITEMS.get(id(chunk)) or _pickled(chunk)))
        kinds |= dict.fromkeys(self.objects, BytesStorageMetadata())
        items += [(MetadataIndex(key), data) for key, data in self.objects.items()]
        places, start = {}, 0
        for index, data in items:
            places[index] = _StorageInfo("__0_0.distcp", start, len(data))
            start += len(data)
        metadata = Metadata(kinds, None, places, StorageMeta())
        metadata.mcore_data = self.mcore_data  # type: ignore[attr-defined]
        (root / ".metadata").write_bytes(pickle.dumps(metadata))
        (root / "__0_0.distcp").write_bytes(b"".join(data for _, data in items))
        torch.save(self.common, root / "common.pt")
        (root / "metadata.json").write_text(self.backend)
        return folder


@pytest.fixture
def full() -> KeptDist:
    """States in the shape of their parameters (fully_reshardable), of tp=2, pp=2, dp=2."""
    return KeptDist("llama-tp2-pp2-dp2-full")


@pytest.fixture
def buckets() -> KeptDist:
    """States in flat buckets (dp_reshardable), of tp=2, dp=2."""
    return KeptDist("llama-tp2-dp2-dp")


def read(folder: Path) -> Index:
    """The index of a folder, whose fragments tile every state."""
    index = MegatronFormat().read(folder)
    check_cover(index)
    return index


def read_contents(index: Index) -> dict[str, Tensor]:
    """All states but steps, by NAME/STATE."""
    return {name: tensor for name, tensor in read_states(index).items() if not name.endswith("/step")}
