"""torch_dist checkpoints of runs that never were: folders as megatron-core writes them, to be changed before saving.

A small Llama; its tensors are cut and flattened as megatron-core's own code does (cited at each place).
"""

from __future__ import annotations

import io
import json
import math
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
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

from ucp.core.gaps import check_cover
from ucp.core.index import Index
from ucp.core.slices import Locator, resolve
from ucp.core.target import full_slice
from ucp.io.files import Sources
from ucp.transfer.gather import Gatherer

LAYERS, HIDDEN, FFN, VOCAB = 2, 8, 12, 16
STATES = ("param", "exp_avg", "exp_avg_sq")
Chunks = list[tuple[tuple[int, ...], Tensor]]

RENAMED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""core/models/gpt/gpt_layer_specs.py: sharded_state_dict_keys_map of the local spec."""


@dataclass
class FakeDist:
    """Keys to chunks, objects, and the common state."""

    tp: int = 1
    sharding: str | None = None
    truth: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], Chunks]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    mcore_data: dict[str, Any] = field(default_factory=dict)
    bucketed: list[str] = field(default_factory=list)
    """Parameters in the flat buffers of the distributed optimizer; empty for all."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for name in names():
            for state in STATES:
                self.truth[f"{name}/{state}"] = torch.randn(shape_of(name), generator=generator)
        self.common = {
            "args": Namespace(
                tensor_model_parallel_size=self.tp,
                swiglu=True,
                normalization="RMSNorm",
                num_layers=LAYERS,
                untie_embeddings_and_output_weights=True,
            ),
            "iteration": 7,
            "checkpoint_version": 3.0,
            "optimizer": {"optimizer": {"param_groups": groups()}, "param_state_sharding_type": self.sharding},
        }

    def weights(self) -> None:
        """Chunks of the model."""
        for name in names():
            self.stacked(name, key_of(name), self.truth[f"{name}/param"].to(torch.bfloat16))

    def stacked(self, name: str, key: str, tensor: Tensor) -> None:
        """Add one layer's tensor to its key, in the chunks of all ranks."""
        layer = layer_of(name)
        for offsets, chunk in cuts(name, tensor, self.tp):
            if layer is None:
                self.tensors.setdefault(key, (tuple(tensor.shape), []))[1].append((offsets, chunk))
            else:
                shape = (LAYERS, *tensor.shape)
                self.tensors.setdefault(key, (shape, []))[1].append(((layer, *offsets), chunk[None].clone()))

    def full(self) -> None:
        """States in the shape of their parameters."""
        for name in names():
            for state in STATES:
                self.stacked(name, f"optimizer.state.{state}.{key_of(name)}", self.truth[f"{name}/{state}"])

    def buffer(self, rank: int, state: str, order: list[str] | None = None) -> tuple[Tensor, list[int]]:
        """Local tensors end to end, in the reverse of registration, aligned to 64; and where they start."""
        parts, starts, at = [], [], 0
        for name in order or list(reversed(self.bucketed or names())):
            local = local_of(name, self.truth[f"{name}/{state}"], self.tp, rank).flatten()
            start = -(-at // 64) * 64
            parts += [torch.full((start - at,), math.nan), local]
            starts.append(start)
            at = start + local.numel()
        return torch.cat(parts), starts

    def buckets(self, dp: int = 2) -> None:
        """dp_reshardable: chunks per parameter and data-parallel rank, and of padding; the last reaches too far."""
        for rank in range(self.tp):
            for state in STATES:
                flat, starts = self.buffer(rank, state)
                each = -(-flat.numel() // dp)
                edges = sorted({*starts, *self._ends(rank), *(each * n for n in range(dp)), flat.numel()})
                chunks: Chunks = [((a,), flat[a:b].clone()) for a, b in pairwise(edges)]
                chunks[-1] = (chunks[-1][0], torch.cat([chunks[-1][1], torch.zeros(5)]))
                self.tensors[bucket_key(rank, state)] = ((flat.numel(),), chunks)
            self._group_objects(rank)

    def _ends(self, rank: int) -> list[int]:
        _, starts = self.buffer(rank, "param")
        order = list(reversed(self.bucketed or names()))
        sizes = [local_of(name, self.truth[f"{name}/param"], self.tp, rank).numel() for name in order]
        return [start + size for start, size in zip(starts, sizes, strict=True)]

    def layer_wise(self) -> list[str]:
        """Muon by layers (0.20 layer_wise_optimizer.py): matrices under keys of their own, the rest in buckets."""
        ends = ("embedding.word_embeddings.weight", "output_layer.weight")
        matrices = [name for name in names() if len(shape_of(name)) == 2 and name not in ends]
        for name in matrices:
            for state, key in (("param", "fp32_param"), ("exp_avg", "momentum_buffer")):
                self.stacked(name, f"chained_0.optimizer.state.{key}.{key_of(name)}", self.truth[f"{name}/{state}"])
        self.bucketed = [name for name in names() if name not in matrices]
        self.buckets()
        self.common["optimizer"] = {
            0: {"optimizer": {"param_groups": groups()[:1]}},
            1: {"param_state_sharding_type": "dp_reshardable"},
        }
        return matrices

    def bucket_space(self, dp: int = 2) -> None:
        """fully_sharded_bucket_space: [ranks, elements of one] (0.13 sharded_param_state_fs_bucket_space)."""
        for rank in range(self.tp):
            for state in STATES:
                flat, starts = self.buffer(rank, state)
                each = -(-flat.numel() // dp)
                flat = torch.cat([flat, torch.full((each * dp - flat.numel(),), math.nan)])
                edges = sorted({*starts, *self._ends(rank), *(each * n for n in range(dp)), flat.numel()})
                chunks: Chunks = [((a // each, a % each), flat[a:b][None].clone()) for a, b in pairwise(edges)]
                self.tensors[bucket_key(rank, state)] = ((dp, each), chunks)
            self._group_objects(rank)

    def gathered(self) -> None:
        """dp_zero_gather_scatter: an object per data-parallel group."""
        dtypes = (torch.bfloat16, torch.float32)
        for rank in range(self.tp):
            states = {state: self.buffer(rank, state)[0] for state in STATES}
            numel = states["param"].numel()
            value = {"buckets_coalesced": True, 0: {dtypes: {**states, "numel_unpadded": numel}}}
            self.objects[f"optimizer.distributed.dp_group_idx_{rank}.param_state/shard_0_1"] = [value]
            self._group_objects(rank)

    def _group_objects(self, rank: int) -> None:
        self.common["optimizer"] = {"param_state_sharding_type": self.sharding}
        self.objects[f"optimizer.distributed.dp_group_idx_{rank}.optimizer/shard_0_1"] = [{"param_groups": groups()}]

    def save(self, folder: Path) -> Path:
        """Write the folder, two items files, and return it."""
        root = folder / "iter_0000007"
        root.mkdir(parents=True)
        writer = _Items(root)
        for key, (shape, chunks) in self.tensors.items():
            writer.tensor(key, shape, chunks)
        torch.save(self.common, root / "common.pt")
        for key, value in self.objects.items():
            writer.object(key, value)
        writer.close(self.mcore_data)
        backend: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (root / "metadata.json").write_text(json.dumps(backend))
        return folder


class _Items:
    """Items as torch.distributed.checkpoint writes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = [b"", b""]
        self.kinds: dict[str, Any] = {}
        self.places: dict[Any, Any] = {}

    def _item(self, value: Any) -> _StorageInfo:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        number = len(self.places) % 2
        place = _StorageInfo(f"__{number}_0.distcp", len(self.files[number]), len(buffer.getvalue()))
        self.files[number] += buffer.getvalue()
        return place

    def tensor(self, key: str, shape: tuple[int, ...], chunks: Chunks) -> None:
        dtype = chunks[0][1].dtype
        metadata = [ChunkStorageMetadata(torch.Size(o), t.shape) for o, t in chunks]
        self.kinds[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), metadata)
        for offsets, tensor in chunks:
            self.places[MetadataIndex(key, torch.Size(offsets))] = self._item(tensor)

    def object(self, key: str, value: Any) -> None:
        self.kinds[key] = BytesStorageMetadata()
        self.places[MetadataIndex(key)] = self._item(value)

    def close(self, mcore_data: dict[str, Any]) -> None:
        metadata = Metadata(self.kinds, None, self.places, StorageMeta())
        metadata.mcore_data = mcore_data  # type: ignore[attr-defined]
        (self.root / ".metadata").write_bytes(pickle.dumps(metadata))
        for number, data in enumerate(self.files):
            (self.root / f"__{number}_0.distcp").write_bytes(data)


def names() -> list[str]:
    """Parameters in the order of registration."""
    inner = (
        "input_layernorm.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    )
    layers = [f"decoder.layers.{layer}.{name}" for layer in range(LAYERS) for name in inner]
    return ["embedding.word_embeddings.weight", *layers, "decoder.final_layernorm.weight", "output_layer.weight"]


def shape_of(name: str) -> tuple[int, ...]:
    if "layernorm" in name:
        return (HIDDEN,)
    if "fc1" in name:
        return (2 * FFN, HIDDEN)
    if "fc2" in name:
        return (HIDDEN, FFN)
    return (VOCAB if "layers" not in name else 2 * HIDDEN if "qkv" in name else HIDDEN, HIDDEN)


def layer_of(name: str) -> int | None:
    return int(name.split(".")[2]) if ".layers." in name else None


def key_of(name: str) -> str:
    """Key of the homogeneous style: without the layer, norms renamed."""
    layer = layer_of(name)
    if layer is None:
        return name
    rest = name.removeprefix(f"decoder.layers.{layer}.")
    return f"decoder.layers.{RENAMED.get(rest, rest)}"


def bucket_key(rank: int, state: str) -> str:
    buffer = f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0"
    return f"{buffer}.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.{state}"


def cuts(name: str, tensor: Tensor, tp: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Chunks of a tensor over `tp` ranks."""
    if "layernorm" in name:
        yield (0,), tensor.clone()
        return
    dim = 1 if "fc2" in name or "linear_proj" in name else 0
    count = 2 * tp if "fc1" in name else tp  # core/transformer/mlp.py: apply_swiglu_sharded_factory
    each = tensor.shape[dim] // count
    for number in range(count):
        offsets = (0, each * number) if dim else (each * number, 0)
        yield offsets, tensor.narrow(dim, each * number, each).clone()


def local_of(name: str, tensor: Tensor, tp: int, rank: int) -> Tensor:
    """The tensor as one rank holds it."""
    chunks = [chunk for _, chunk in cuts(name, tensor, tp)]
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat([chunks[rank], chunks[tp + rank]]) if "fc1" in name else chunks[rank]


def groups() -> list[dict[str, Any]]:
    return [{"wd_mult": 1.0, "lr": 0.1, "step": 7}, {"wd_mult": 0.0, "lr": 0.1, "step": 7}]


@pytest.fixture
def fake() -> Callable[..., FakeDist]:
    """Makes a run."""
    return FakeDist


@pytest.fixture
def read() -> Callable[[Path], Index]:
    """Reads a folder, and proves its cover."""

    def reader(folder: Path) -> Index:
        index = MegatronFormat().read(folder)
        check_cover(index)
        return index

    return reader


@pytest.fixture
def contents() -> Callable[[Index], dict[str, Tensor]]:
    """States of an index as tensors, named as the truth; step left out."""

    def of(index: Index) -> dict[str, Tensor]:
        gatherer = Gatherer(sources=Sources())
        found = {}
        for atom, key, state in index.states():
            if key != "step":
                own = full_slice(atom.name, key, state)
                data = memoryview(bytearray(own.nbytes))
                gatherer.fill(data, own.dtype, resolve(own, Locator(state), 0, own.stop))
                dtype = getattr(torch, own.dtype.value)
                name = f"{atom.name}/{'param' if key == 'weight' else key}"
                found[name] = torch.frombuffer(data, dtype=dtype).reshape(state.global_shape)
        gatherer.sources.close()
        return found

    return of
