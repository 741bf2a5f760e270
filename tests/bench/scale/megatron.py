"""torch_dist checkpoints of megatron-core 0.16.1, of any number of ranks, with holes for tensors.

A mixture of experts over tensor-, pipeline- and expert-parallel ranks with the distributed optimizer, saved as
`fully_reshardable`. torch's own classes make `.metadata`, with the plans of all ranks in it, as megatron-core saves
them; the common state, and the objects of ranks, are those of a kept fixture, with sizes and degrees of our own. Keys,
shapes, chunks and bytes of items are compared with that fixture (tests/bench/scale/test_scale_megatron.py). Which copy
of a tensor is saved by which rank is the writer's affair: here they take turns.
"""

from __future__ import annotations

import argparse
import os
import pickle
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tests.bench.scale.holes import item_of
from tests.bench.scale.moe import Moe
from ucp.io.dcp.metadata import read_metadata
from ucp.io.pickle.values import GlobalName, Stub
from ucp.io.torch_file.archive import read_archive

FIXTURE = Path(__file__).parents[3] / "fixtures" / "megatron" / "mixtral-ep4-dp4-full" / "checkpoint"
ITERATION = "iter_0000010"
_STATES = ("param", "exp_avg", "exp_avg_sq")
_MASTER = "optimizer.state.param."
_FILES = 2
"""Files of a rank (`thread_count` of the writer)."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism; experts are whole on their ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk of a tensor, and a rank that saves it."""

    key: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    ranks: range


@dataclass(slots=True)
class _File:
    """A `.distcp` file in the making."""

    name: str
    descriptor: int
    at: int = 0
    items: list[WriteItem] = field(default_factory=list)
    names: tuple[dict[str, str], dict[str, str]] = field(default_factory=lambda: ({}, {}))
    """Keys as its rank has them, in what it saved and in its plan: a pickle writes the text once for each."""

    def named(self, key: str, where: int) -> str:
        """The key as the rank has it."""
        return self.names[where].setdefault(key, "".join([key[:1], key[1:]]))


def write_torch_dist(folder: Path, moe: Moe, layout: Layout) -> None:
    """Write `folder`/iter_0000010 and the file that points there."""
    if moe.experts % layout.ep or moe.groups % layout.tp or (layout.tp * layout.dp) % layout.ep:
        raise ValueError(f"{layout} does not divide {moe}")
    iteration = folder / ITERATION
    iteration.mkdir(parents=True)
    kept = FIXTURE / ITERATION
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    (iteration / "metadata.json").write_text((kept / "metadata.json").read_text())
    torch.save(_common(kept, moe, layout), iteration / "common.pt")
    with ExitStack() as stack:
        writer = _Writer(iteration, layout.world, stack)
        for key, rank, data in _objects(kept, moe, layout):
            writer.add_object(key, rank, data)
        for piece in _pieces(moe, layout):
            writer.add(piece, torch.bfloat16)
            for state in _STATES:
                writer.add(piece, torch.float32, prefix=f"optimizer.state.{state}.")
        writer.finish(iteration)


class _Writer:
    """Puts items into files, and what torch records of them into `.metadata`."""

    def __init__(self, folder: Path, ranks: int, stack: ExitStack) -> None:
        self._turn = 0
        self._files: list[list[_File]] = []
        for rank in range(ranks):
            self._files.append([])
            for number in range(_FILES):
                path = folder / f"__{rank}_{number}.distcp"
                descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
                stack.callback(os.close, descriptor)
                self._files[rank].append(_File(path.name, descriptor))
        self._state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def add_object(self, key: str, rank: int, data: bytes) -> None:
        """Add an object that `rank` saves."""
        file = self._next(rank)
        self._state[key] = BytesStorageMetadata()
        self._storage[MetadataIndex(file.named(key, 0))] = _StorageInfo(file.name, file.at, len(data))
        file.items.append(WriteItem(index=MetadataIndex(file.named(key, 1)), type=WriteItemType.BYTE_IO))
        os.pwrite(file.descriptor, data, file.at)
        file.at += len(data)

    def add(self, piece: _Piece, dtype: torch.dtype, *, prefix: str = "") -> None:
        """Add a chunk, of the weights or of an optimizer state."""
        key = f"{prefix}{piece.key}"
        file = self._next(piece.ranks[self._turn % len(piece.ranks)])
        item = item_of(dtype, piece.sizes)
        known = self._state.get(key)
        if known is None:
            known = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(piece.shape), [])
            self._state[key] = known
        assert isinstance(known, TensorStorageMetadata)  # keys of objects are others
        place = MetadataIndex(file.named(key, 0), torch.Size(piece.offsets), len(known.chunks))
        known.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
        self._storage[place] = _StorageInfo(file.name, file.at, item.total)
        file.items.append(_write_item(file.named(key, 1), piece, dtype))
        item.write(file.descriptor, file.at, f"{key.removeprefix(_MASTER)} {piece.offsets}")
        file.at += item.total

    def _next(self, rank: int) -> _File:
        """The file of `rank` with fewest items."""
        self._turn += 1
        return min(self._files[rank], key=lambda file: len(file.items))

    def finish(self, folder: Path) -> None:
        """Write `.metadata`."""
        meta = StorageMeta(checkpoint_id=str(folder.name), save_id=str(uuid.UUID(int=0)))
        metadata = Metadata(self._state, None, self._storage, meta, "1.0.0")
        plans = [SavePlan([item for file in own for item in file.items]) for own in self._files]
        metadata.all_local_plans = plans  # type: ignore[attr-defined]  # as megatron-core does
        with (folder / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)


def _write_item(key: str, piece: _Piece, dtype: torch.dtype) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(piece.shape))
    index = MetadataIndex(key, chunk.offsets)
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _pieces(moe: Moe, layout: Layout) -> Iterator[_Piece]:
    """Every chunk of the model."""
    first, last = _stage_ranks(layout, 0), _stage_ranks(layout, layout.pp - 1)
    for key, shape in moe.ends().items():
        yield from _cut(key, shape, (), layout, first if key.startswith("embedding") else last)
    for layer in range(moe.layers):
        ranks = _stage_ranks(layout, layer * layout.pp // moe.layers)
        for name, shape in moe.attention().items():
            yield from _cut(f"decoder.layers.{name}", (moe.layers, *shape), (layer,), layout, ranks)
        each = moe.experts // layout.ep
        for expert in range(moe.experts):
            own = ranks[expert // each :: layout.ep]
            for name, shape, halves in (
                ("linear_fc1.weight", (2 * moe.ffn, moe.hidden), 2),
                ("linear_fc2.weight", (moe.hidden, moe.ffn), 1),
            ):
                rows = shape[0] // halves
                for half in range(halves):
                    yield _Piece(
                        f"decoder.layers.mlp.experts.experts.{name}",
                        (moe.layers, moe.experts, *shape),
                        (layer, expert, half * rows, 0),
                        (1, 1, rows, shape[1]),
                        own,
                    )


def _stage_ranks(layout: Layout, stage: int) -> range:
    """Ranks of a pipeline stage; the tensor-parallel rank goes fastest (order tp-cp-ep-dp-pp)."""
    each = layout.tp * layout.dp
    return range(stage * each, stage * each + each)


def _cut(key: str, shape: Shape, at: Shape, layout: Layout, ranks: range) -> Iterator[_Piece]:
    """A tensor over tensor-parallel ranks. `at`: its layer, where it is stacked."""
    dims = {"linear_qkv.weight": 0, "linear_proj.weight": 1, "word_embeddings.weight": 0, "output_layer.weight": 0}
    dim = next((dim for name, dim in dims.items() if key.endswith(name)), None)
    origin, sizes = [*at, *(0 for _ in shape[len(at) :])], [*(1 for _ in at), *shape[len(at) :]]
    if dim is None:
        yield _Piece(key, shape, tuple(origin), tuple(sizes), ranks)
        return
    sizes[len(at) + dim] //= layout.tp
    for rank in range(layout.tp):
        origin[len(at) + dim] = rank * sizes[len(at) + dim]
        yield _Piece(key, shape, tuple(origin), tuple(sizes), ranks[rank :: layout.tp])


def _objects(kept: Path, moe: Moe, layout: Layout) -> Iterator[tuple[str, int, bytes]]:
    """Objects as ranks save them: key, rank and bytes."""
    saved = read_metadata(str(kept / ".metadata")).objects
    extra, random = (
        _bytes(kept, *next(place for key, place in saved.items() if part in key))
        for part in ("_extra_state", "rng_state")
    )
    each = moe.experts // layout.ep
    for layer in range(moe.layers):
        ranks = _stage_ranks(layout, layer * layout.pp // moe.layers)
        for name in ("self_attention.linear_proj", "self_attention.linear_qkv"):
            yield f"decoder.layers.{name}._extra_state/shard_{layer}_{moe.layers}", ranks[0], extra
        for expert in range(moe.experts):
            for name in ("linear_fc1", "linear_fc2"):
                place = f"shard_{layer}.{expert}_{moe.layers}.{moe.experts}"
                rank = ranks[expert // each % layout.ep]
                yield f"decoder.layers.mlp.experts.experts.{name}._extra_state/{place}", rank, extra
    for stage in range(layout.pp):
        for tp in range(layout.tp):
            yield f"rng_state/shard_{stage}.{tp}_{layout.pp}.{layout.tp}", _stage_ranks(layout, stage)[tp], random


def _bytes(folder: Path, file: str, offset: int, nbytes: int) -> bytes:
    with (folder / file).open("rb") as source:
        source.seek(offset)
        return source.read(nbytes)


def _common(kept: Path, moe: Moe, layout: Layout) -> dict[object, object]:
    """The common state of the fixture, for this model and these ranks."""
    root = read_archive(str(kept / "common.pt")).root
    assert isinstance(root, dict)  # as the fixture has it
    assert isinstance(root["args"], Stub)
    saved = root["args"].state
    assert isinstance(saved, dict)
    plain = {key: value for key, value in saved.items() if isinstance(value, str | int | float | bool | None)}
    plain |= {key: getattr(torch, own.qualname) for key, own in saved.items() if isinstance(own, GlobalName)}
    sizes = {
        "num_layers": moe.layers,
        "hidden_size": moe.hidden,
        "ffn_hidden_size": moe.ffn,
        "moe_ffn_hidden_size": moe.ffn,
        "num_attention_heads": moe.hidden // moe.head,
        "kv_channels": moe.head,
        "num_query_groups": moe.groups,
        "num_experts": moe.experts,
        "padded_vocab_size": moe.vocabulary,
        "vocab_size": moe.vocabulary,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "transformer_pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
        "data_parallel_size": layout.dp,
        "world_size": layout.world,
    }
    args = argparse.Namespace(**{**plain, **{key: value for key, value in sizes.items() if key in plain}})
    return {**root, "args": args}
