"""A torch_dist checkpoint of very many very small tensors: what matters is its index.

Written with torch's own metadata classes in the shape of megatron-core 0.16.1: a Mixtral of many layers and experts,
with a key for every layer, expert and GLU half, and fully_reshardable optimizer states. The bytes of the tensors are
there, so that it converts, too.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Iterator
from math import prod
from pathlib import Path

EXPERTS = 256
FILES = 8
HIDDEN = 16
FFN = 2
VOCABULARY = 64

_STATES = ("param", "exp_avg", "exp_avg_sq")
_EXPERT = {
    "linear_fc1.weight_w": (FFN, HIDDEN),
    "linear_fc1.weight_v": (FFN, HIDDEN),
    "linear_fc2.weight": (HIDDEN, FFN),
}
_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
    "self_attention.linear_qkv.weight": (2 * HIDDEN, HIDDEN),
    "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
    "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
    "mlp.router.weight": (EXPERTS, HIDDEN),
}
_ENDS = {
    "embedding.word_embeddings.weight": (VOCABULARY, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (VOCABULARY, HIDDEN),
}


def write_many_tensors(folder: Path, *, tensors: int) -> None:
    """Write `folder`/checkpoint with at least `tensors` tensors: whole layers, weights and states."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    per_layer = (1 + len(_STATES)) * (len(_LAYER) + EXPERTS * len(_EXPERT))
    layers = -(-tensors // per_layer)
    iteration = folder / "checkpoint" / "iter_0000010"
    iteration.mkdir(parents=True, exist_ok=True)
    saved: dict[tuple[str, tuple[int, ...]], bytes] = {}
    state, storage = {}, {}
    files = [(iteration / f"__{number}_0.distcp").open("wb") for number in range(FILES)]
    for at, (name, dtype, shape) in enumerate(_entries(layers)):
        number, origin = at % FILES, torch.Size([0] * len(shape))
        if (dtype, shape) not in saved:
            saved[dtype, shape] = _saved(dtype, shape)
        data = saved[dtype, shape]
        chunk = ChunkStorageMetadata(origin, torch.Size(shape))
        properties = TensorProperties(dtype=getattr(torch, dtype))
        state[name] = TensorStorageMetadata(properties, torch.Size(shape), [chunk])
        place = _StorageInfo(files[number].name.rpartition("/")[2], files[number].tell(), len(data))
        storage[MetadataIndex(name, origin, 0)] = place
        files[number].write(data)
    for file in files:
        file.close()
    (iteration / ".metadata").write_bytes(pickle.dumps(Metadata(state, None, storage, StorageMeta())))
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}
    (iteration / "metadata.json").write_text(json.dumps(backend | common))
    torch.save(_common(layers), iteration / "common.pt")
    (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("10")


def _entries(layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    shapes = dict(_ENDS)
    for layer in range(layers):
        stem = f"decoder.layers.{layer}."
        shapes |= {stem + name: shape for name, shape in _LAYER.items()}
        for expert in range(EXPERTS):
            shapes |= {f"{stem}mlp.experts.experts.{expert}.{name}": shape for name, shape in _EXPERT.items()}
    for name, shape in shapes.items():
        yield name, "bfloat16", shape
        for state in _STATES:
            yield f"optimizer.state.{state}.{name}", "float32", shape


def _saved(dtype: str, shape: tuple[int, ...]) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(torch.arange(1, 1 + prod(shape)).reshape(shape).to(getattr(torch, dtype)), buffer)
    return buffer.getvalue()


def _common(layers: int) -> dict[str, object]:
    sizes = {"num_layers": layers, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "padded_vocab_size": VOCABULARY}
    attention = {"num_attention_heads": 4, "kv_channels": 4, "group_query_attention": True, "num_query_groups": 2}
    kind = {"num_experts": EXPERTS, "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False}
    degrees = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1}
    rest = {"untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "bf16": True}
    group = {"wd_mult": 1.0, "lr": 1e-3, "step": 2}
    optimizer = {"optimizer": {"param_groups": [group]}, "param_state_sharding_type": "fully_reshardable"}
    return {
        "checkpoint_version": 3.0,
        "iteration": 10,
        "args": argparse.Namespace(**sizes, **attention, **kind, **degrees, **rest),
        "optimizer": optimizer,
    }
