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

Canonical names of the parameters of a torch_dist checkpoint, and the order in which the model registers them.

The family tells both. A model of no known family keeps the names of its keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import choose_family
from ucp.errors import UnknownFamilyError
from ucp.families.family import Family

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
    full_key: str
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
    kind: str
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
    if match is not None:
        fused = _FUSED.get(match["part"])
        in_rows = any(match["part"] in row for row in PARTS) if fused is None else fused.search(match["whole"])
        if in_rows:
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


def _chain(match: re.Match[str]) -> int | None:
    return None if match["chain"] is None else int(match["chain"])


_BUFFERS = ("expert_bias", "local_tokens_per_expert", "qb_beta", "inv_freq")
"""Tensors of a model that are not trained, for names that no family knows."""


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


_FUSED_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv."),
    ("norm.", "mixer.in_proj."),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj."),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj."),
)
"""Norms that Transformer Engine has in the module that follows them, where they come right before its weight."""


class DistNames:
    """Names of one checkpoint."""

    def __init__(self, family: Family | None, notes: tuple[str, ...]) -> None:
        self.family = family
        """The model family; None when it is of none that is known."""
        self.notes = notes
        """What was chosen, and why."""
        self._templates: dict[str, str] = {}
        self._understood: dict[str, ModelKey] = {}

    def parse(self, key: str) -> ModelKey:
        """The key of a model's tensor, with the template of its canonical name; several states have the same."""
        known = self._understood.get(key)
        if known is None:
            parsed = parse_model_key(key)
            known = ModelKey(self.template(parsed.full_key), parsed.stacked, parsed.full_key, parsed.part)
            self._understood[key] = known
        return known

    def template(self, key: str) -> str:
        """Canonical name for the key of a whole tensor, with {layer} and {expert} where it is stacked."""
        if self.family is None:
            return parse_model_key(key).template
        outline = _NUMBER.sub("#", key)
        numbers = _NUMBER.findall(key)
        text = self._templates.get(outline)
        if text is None:
            canonical = self.family.canonical(key)
            name = parse_model_key(key).template if canonical is None else canonical
            if numbers == _NUMBER.findall(name) and len(set(numbers)) == len(numbers):
                self._templates[outline] = _NUMBER.sub("#", name)  # others of its outline have theirs in its order
            return name
        for number in numbers:
            text = text.replace("#", number, 1)
        return text

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor of the model is none that is trained."""
        known = None if self.family is None or self.family.read(name) is None else self.family.match([name]).get(name)
        return name.rpartition(".")[2] in _BUFFERS if known is None else known.buffer

    def registration_orders(self, names: Iterable[str]) -> list[list[str]]:
        """Orders in which the model may have registered its parameters; none when its family is not known."""
        if self.family is None:
            return []
        local = self.sort(names)
        fused = local
        for norm, module in _FUSED_NORMS:
            fused = _moved(fused, norm, module)
        return [local, _moved(local, *_FUSED_NORMS[0]), fused]

    def sort(self, names: Iterable[str]) -> list[str]:
        """Names in the order of registration."""
        return list(names) if self.family is None else self.family.sort_canonical(names)


def name_tensors(
    shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, object], options: SourceOptions
) -> DistNames:
    """Names for the tensors of a model, given its keys and their shapes.

    Raises FamilyError naming all keys without a rule, when the user named the family.
    """
    usual = {(_NUMBER.sub("#", key), shape): key for key, shape in shapes.items()}
    few = {key: shape for (_, shape), key in usual.items()}
    try:
        family, reasons = choose_family(names=list(few), shapes=few, arguments=arguments, options=options)
    except UnknownFamilyError as error:
        first, *nearest = (line.strip() for line in str(error).splitlines())
        reason = "; ".join((first.rstrip(":"), *nearest[:1], *nearest[1:][-1:]))
        return DistNames(None, (f"names are those of the file, because the model family is not known: {reason}",))
    wholes = dict.fromkeys(parse_model_key(key).full_key for key in few)
    strange = [key for key in wholes if not family.ignores(key) and family.read(key) is None]
    family.match(strange)  # raises: by evidence a family has a rule for every name, so the user named this one
    return DistNames(family, (f"model family {family.name}: {'; '.join(reasons)}",))


def _moved(names: list[str], norm: str, module: str) -> list[str]:
    """`names` with the norms of every layer put right before the parameters of `module` of that layer."""
    norms: dict[str, list[str]] = {}
    for name in names:
        layer, found, _ = name.rpartition(norm)
        if found and layer.endswith("."):
            norms.setdefault(layer, []).append(name)
    moved = {name for own in norms.values() for name in own}
    result = []
    for name in names:
        layer, found, _ = name.partition(module)
        if found and layer in norms:
            result += norms.pop(layer)
        if name not in moved:
            result.append(name)
    return result + [name for own in norms.values() for name in own]
