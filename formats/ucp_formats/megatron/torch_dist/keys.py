"""The grammar of keys in a torch_dist checkpoint (megatron-core 0.6 to 0.19).

| key | what |
|---|---|
| decoder.final_layernorm.weight | a tensor of the model |
| decoder.layers.mlp.linear_fc2.weight | the same of all layers, stacked: dim 0 is the layer |
| decoder.layers.7.mlp.linear_fc2.weight | of one layer, where layers differ |
| decoder.layers.mlp.experts.experts.linear_fc2.weight | of all experts of all layers: dim 1 is the expert |
| decoder.layers.7.mlp.experts.experts.3.linear_fc1.weight_w | singleton: of one expert; gate (`_w`), up (`_v`) |
| decoder.layers.0.mixer.in_proj.weight.z | a part of a fused tensor: z, x, B, C, dt |
| optimizer.state.exp_avg.<tensor of the model> | a state of a parameter; `param` or `fp32_param` is the master |
| optimizer.distributed.dp_group_idx_5.gbuf_idx_0.dtype_(torch.bfloat16, ...).bucket_idx_0.exp_avg | a bucket |
| optimizer.distributed.dp_group_idx_5.optimizer/shard_0_1 | an object |
| decoder.layers.mlp.linear_fc1._extra_state/shard_3_8 | an object per layer |
| rng_state/shard_1.0_2.2 | an object per pipeline stage and tensor-parallel rank |

A key of the optimizer may have the prefix `chained_<k>.`: of which of several optimizers it is.

>>> parse_state_key("chained_1.optimizer.state.param.output_layer.weight")
StateKey(chain=1, state='param', model='output_layer.weight')
>>> parse_model_key("decoder.layers.mlp.experts.experts.linear_fc1.weight")
ModelKey(template='decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight', stacked=('layer', \
'expert'), whole='decoder.layers.mlp.experts.experts.linear_fc1.weight', part='')
>>> parse_object_key("rng_state/shard_1.0_2.2")
ObjectKey(name='rng_state', offsets=(1, 0), shape=(2, 2))
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "PARTS",
    "BucketKey",
    "GroupObjectKey",
    "ModelKey",
    "ObjectKey",
    "StateKey",
    "parse_bucket_key",
    "parse_group_object",
    "parse_model_key",
    "parse_object_key",
    "parse_state_key",
]

PARTS: tuple[tuple[str, ...], ...] = (
    ("_w", "_v"),
    (".z", ".x", ".B", ".C", ".dt"),
    (".x", ".B", ".C"),
    (".query", ".key", ".value", ".z", ".beta", ".alpha"),
    (".query", ".key", ".value", ".z", ".f", ".b", ".w"),
    (".query", ".key", ".value"),
)
"""Suffixes of the parts of a fused tensor, in the order in which they lie along dim 0 (core/transformer/mlp.py,
core/ssm/mamba_mixer.py, core/ssm/gated_delta_net.py). A fused tensor has all parts of one row, and no other."""

_CHAIN = r"(?:chained_(?P<chain>\d+)\.)?"
_STATE = re.compile(_CHAIN + r"optimizer\.state\.(?P<state>[^.]+)\.(?P<model>.+)")
_BUCKET = re.compile(
    _CHAIN + r"optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_(?P<dtype>.+)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>[^.]+)"
)
_GROUP_OBJECT = re.compile(_CHAIN + r"optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.(?P<what>[^./]+)")
_OBJECT = re.compile(r"(?P<name>.+)/shard_(?P<offsets>\d+(?:\.\d+)*)_(?P<shape>\d+(?:\.\d+)*)")
_LAYERS = re.compile(r"(?<![^.])layers\.(?!\d+\.)")
_EXPERTS = re.compile(r"(?<![^.])experts\.experts\.(?!\d+\.)")
_EXPERT = re.compile(r"(?<![^.])experts\.experts\.(?=\d+\.)")
_FUSED = {
    "_w": re.compile(r"linear_fc1\.(?:weight|bias)"),
    "_v": re.compile(r"linear_fc1\.(?:weight|bias)"),
}
_PART = re.compile(r"(?P<whole>.+\.(?:weight|bias))(?P<part>_[wv]|\.[A-Za-z]+)")


class ModelKey(NamedTuple):
    """Key of a tensor of the model."""

    template: str
    """Name of the parameter, with {layer} and {expert} where the tensor is stacked along a dim of its own."""
    stacked: tuple[str, ...]
    """What its leading dims count: "layer", "expert"."""
    whole: str
    """The key without the suffix of a part."""
    part: str = ""
    """Suffix of the part of a fused tensor that it is; empty for a whole one."""


class StateKey(NamedTuple):
    """Key of a state of a parameter, in the shape of the parameter."""

    chain: int | None
    """Which of several optimizers."""
    state: str
    """Name of the state."""
    model: str
    """Key of the parameter."""


@dataclass(frozen=True, slots=True)
class BucketKey:
    """Key of one state of a bucket of the distributed optimizer."""

    chain: int | None
    """Which of several optimizers."""
    group: int
    """Data-parallel group: the rank in the model-parallel grid, tensor-parallel rank fastest."""
    buffer: int
    """Buffer of that rank."""
    dtype: str
    """Types of parameters and gradients, as written."""
    bucket: int
    """Bucket of the buffer."""
    state: str
    """Name of the state."""


@dataclass(frozen=True, slots=True)
class GroupObjectKey:
    """Name of an object that a data-parallel group saved."""

    chain: int | None
    """Which of several optimizers."""
    group: int
    """Data-parallel group."""
    what: str
    """"optimizer", "param_state", "grad_scaler", "per_bucket_numel", ..."""


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """Key of an object."""

    name: str
    """What it is."""
    offsets: tuple[int, ...]
    """Which one of a grid of such objects."""
    shape: tuple[int, ...]
    """Shape of that grid; early versions leave out the last number."""


def parse_state_key(key: str) -> StateKey | None:
    """The key understood, or None when it is no state of a parameter."""
    match = _STATE.fullmatch(key)
    return None if match is None else StateKey(_chain(match), match["state"], match["model"])


def parse_bucket_key(key: str) -> BucketKey | None:
    """The key understood, or None when it is no bucket."""
    match = _BUCKET.fullmatch(key)
    if match is None:
        return None
    group, buffer, bucket = (int(match[name]) for name in ("group", "buffer", "bucket"))
    return BucketKey(_chain(match), group, buffer, match["dtype"], bucket, match["state"])


def parse_group_object(name: str) -> GroupObjectKey | None:
    """The name of an object understood, or None when no data-parallel group saved it."""
    match = _GROUP_OBJECT.fullmatch(name)
    return None if match is None else GroupObjectKey(_chain(match), int(match["group"]), match["what"])


def parse_object_key(key: str) -> ObjectKey | None:
    """The key understood, or None when it does not name an object of megatron-core."""
    match = _OBJECT.fullmatch(key)
    if match is None:
        return None
    offsets, shape = (tuple(map(int, match[name].split("."))) for name in ("offsets", "shape"))
    return ObjectKey(match["name"], offsets, shape)


def parse_model_key(key: str) -> ModelKey:
    """The key of a tensor of the model, understood."""
    match = _PART.fullmatch(key)
    part = ""
    if match is not None and _is_part(match["whole"], match["part"]):
        key, part = match["whole"], match["part"]
    whole, stacked = key, []
    if _LAYERS.search(key):
        key = _LAYERS.sub("layers.{layer}.", key, count=1)
        stacked.append("layer")
    if _EXPERTS.search(key):
        key = _EXPERTS.sub("experts.local_experts.{expert}.", key, count=1)
        stacked.append("expert")
    else:
        key = _EXPERT.sub("experts.local_experts.", key, count=1)
    return ModelKey(key, tuple(stacked), whole, part)


def _is_part(whole: str, part: str) -> bool:
    fused = _FUSED.get(part)
    if fused is not None:
        return fused.search(whole) is not None
    return any(part in row for row in PARTS)


def _chain(match: re.Match[str]) -> int | None:
    return None if match["chain"] is None else int(match["chain"])
