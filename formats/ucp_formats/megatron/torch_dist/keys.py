"""The grammar of keys in a torch_dist checkpoint (megatron-core 0.6 to 0.19).

| key | what |
|---|---|
| decoder.final_layernorm.weight | a tensor of the model |
| decoder.layers.mlp.linear_fc2.weight | a tensor of all layers, stacked: dim 0 is the layer |
| decoder.layers.7.mlp.linear_fc2.weight | a tensor of one layer, if layers differ |
| decoder.layers.mlp.experts.experts.linear_fc2.weight | a tensor of all experts: dim 0 is the layer, 1 the expert |
| decoder.layers.7.mlp.experts.experts.3.linear_fc1.weight_w | a part of one expert's tensor: gate (`_w`), up (`_v`) |
| decoder.layers.0.mixer.in_proj.weight.z | a part of a fused tensor: z, x, B, C, dt |
| optimizer.state.exp_avg.<tensor of the model> | a state of a parameter; `param` or `fp32_param` is the master |
| optimizer.distributed.dp_group_idx_5.gbuf_idx_0.dtype_(torch.bfloat16, ...).bucket_idx_0.exp_avg | a bucket's state |
| optimizer.distributed.dp_group_idx_5.optimizer/shard_0_1 | an object of a data-parallel group |
| decoder.layers.mlp.linear_fc1._extra_state/shard_3_8 | an object per layer |
| rng_state/shard_1.0_2.2 | an object per pipeline stage and tensor-parallel rank |

A key of the optimizer may have the prefix `chained_<k>.`: the number of its optimizer in a chain of several.

`DistNames` gives the canonical names of the parameters and their order of registration, both from the model family. If
the family is unknown, parameters keep the names in their keys.

>>> parse_state_key("chained_1.optimizer.state.param.output_layer.weight")
StateKey(chain=1, state='param', model='output_layer.weight')
>>> parse_model_key("decoder.layers.mlp.experts.experts.linear_fc1.weight")
ModelKey(template='decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight', stacked=('layer', \
'expert'), full_key='decoder.layers.mlp.experts.experts.linear_fc1.weight', part='')
>>> parse_object_key("rng_state/shard_1.0_2.2")
ObjectKey(name='rng_state', offsets=(1, 0), shape=(2, 2))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain
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
"""Suffixes of the parts of a fused tensor, in their order along dim 0 (core/transformer/mlp.py,
core/ssm/mamba_mixer.py, core/ssm/gated_delta_net.py). A fused tensor has all parts of one row, and no others."""

_CHAIN = r"(?:chained_(?P<chain>\d+)\.)?"
_STATE = re.compile(_CHAIN + r"optimizer\.state\.(?P<state>[^.]+)\.(?P<model>.+)")
_GROUP = _CHAIN + r"optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\."
_BUCKET = re.compile(
    _GROUP + r"gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtype>.+)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>[^.]+)"
)
_GROUP_OBJECT = re.compile(_GROUP + r"(?P<kind>[^./]+)")
_OBJECT = re.compile(r"(?P<name>.+)/shard_(?P<offsets>\d+(?:\.\d+)*)_(?P<shape>\d+(?:\.\d+)*)")
_LAYERS = re.compile(r"(?<![^.])layers\.(?!\d+\.)")
_EXPERTS = re.compile(r"(?<![^.])experts\.experts\.(?!\d+\.)")
_EXPERT = re.compile(r"(?<![^.])experts\.experts\.(?=\d+\.)")
_PART = re.compile(
    r"(?P<full>.+\.(?:weight|bias))(?P<part>(?:(?<=linear_fc1\.weight)|(?<=linear_fc1\.bias))_[wv]|\.(?:"
    + "|".join(dict.fromkeys(part[1:] for part in chain.from_iterable(PARTS[1:])))
    + "))"
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class ModelKey(NamedTuple):
    """Key of a tensor of the model."""

    template: str
    """Name of the parameter, with {layer} and {expert} if leading dims of the tensor stack layers and experts."""
    stacked: tuple[str, ...]
    """What its leading dims count: "layer", "expert"."""
    full_key: str
    """The key without the suffix of a part."""
    part: str = ""
    """Suffix of the part of a fused tensor; empty for other tensors."""


class StateKey(NamedTuple):
    """Key of a state of a parameter, in the shape of the parameter."""

    chain: int | None
    """Number of the optimizer in a chain."""
    state: str
    """Name of the state."""
    model: str
    """Key of the parameter."""


class BucketKey(NamedTuple):
    """Key of one state of a bucket of the distributed optimizer."""

    chain: int | None
    """Number of the optimizer in a chain."""
    group: int
    """Data-parallel group: the position in the model-parallel grid; the tensor-parallel rank varies fastest."""
    buffer: int
    """Buffer of that rank."""
    dtype: str
    """Types of parameters and gradients, as written."""
    bucket: int
    """Bucket of the buffer."""
    state: str
    """Name of the state."""

    @property
    def label(self) -> str:
        """The bucket, for messages."""
        optimizer = "" if self.chain is None else f"optimizer {self.chain}, "
        return f"{optimizer}data-parallel group {self.group}, buffer {self.buffer}, bucket {self.bucket}"


class GroupObjectKey(NamedTuple):
    """Name of an object that a data-parallel group saved."""

    chain: int | None
    """Number of the optimizer in a chain."""
    group: int
    """Data-parallel group."""
    kind: str
    """"optimizer", "param_state", "grad_scaler", "per_bucket_numel", ..."""


class ObjectKey(NamedTuple):
    """Key of an object."""

    name: str
    """Name, common to all objects of a grid."""
    offsets: tuple[int, ...]
    """Position in the grid."""
    shape: tuple[int, ...]
    """Shape of the grid; early versions leave out the last number."""


def parse_state_key(key: str) -> StateKey | None:
    """The parsed key; None for other keys."""
    match = _STATE.fullmatch(key)
    return None if match is None else StateKey(_chain(match), match["state"], match["model"])


def parse_bucket_key(key: str) -> BucketKey | None:
    """The parsed key; None for other keys."""
    match = _BUCKET.fullmatch(key)
    if match is None:
        return None
    group, buffer, bucket = (int(match[name]) for name in ("group", "buffer", "bucket"))
    return BucketKey(_chain(match), group, buffer, match["dtype"], bucket, match["state"])


def parse_group_object(name: str) -> GroupObjectKey | None:
    """The parsed name of an object; None for objects that no data-parallel group saved."""
    match = _GROUP_OBJECT.fullmatch(name)
    return None if match is None else GroupObjectKey(_chain(match), int(match["group"]), match["kind"])


def parse_object_key(key: str) -> ObjectKey | None:
    """The parsed key; None for objects that megatron-core did not name."""
    match = _OBJECT.fullmatch(key)
    if match is None:
        return None
    offsets, shape = (tuple(map(int, match[name].split("."))) for name in ("offsets", "shape"))
    return ObjectKey(match["name"], offsets, shape)


def parse_model_key(key: str) -> ModelKey:
    """The parsed key of a tensor of the model."""
    match = _PART.fullmatch(key)
    full_key, part = (key, "") if match is None else match.group("full", "part")
    template, stacked = full_key, []
    if _LAYERS.search(template):
        template = _LAYERS.sub("layers.{layer}.", template, count=1)
        stacked.append("layer")
    if _EXPERTS.search(template):
        template = _EXPERTS.sub("experts.local_experts.{expert}.", template, count=1)
        stacked.append("expert")
    else:
        template = _EXPERT.sub("experts.local_experts.", template, count=1)
    return ModelKey(template, tuple(stacked), full_key, part)


def _chain(match: re.Match[str]) -> int | None:
    return None if match["chain"] is None else int(match["chain"])


_BUFFERS = ("expert_bias", "local_tokens_per_expert", "qb_beta", "inv_freq")
"""Last parts of the names of buffers, for names that no family knows."""

_FUSED_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv."),
    ("norm.", "mixer.in_proj."),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj."),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj."),
)
"""Norms that Transformer Engine fuses into the next linear layer, which registers them right before its weight."""


class DistNames:
    """Names of the parameters of one checkpoint."""

    def __init__(self, family: Family | None, notes: tuple[str, ...]) -> None:
        self.family = family
        """The model family; None if unknown."""
        self.notes = notes
        """Which family was chosen, and why."""
        self._templates: dict[str, str] = {}
        self._parsed: dict[str, ModelKey] = {}

    def parse(self, key: str) -> ModelKey:
        """The parsed key of a tensor, with the template of its canonical name; cached."""
        if key not in self._parsed:
            parsed = parse_model_key(key)
            self._parsed[key] = parsed._replace(template=self.template(parsed.full_key))
        return self._parsed[key]

    def template(self, key: str) -> str:
        """Canonical name for the key of a full tensor, with {layer} and {expert} where it is stacked."""
        if self.family is None:
            return parse_model_key(key).template
        outline = _NUMBER.sub("#", key)
        numbers = _NUMBER.findall(key)
        text = self._templates.get(outline)
        if text is None:
            name = self.family.canonical(key) or parse_model_key(key).template
            if numbers == _NUMBER.findall(name) and len(set(numbers)) == len(numbers):
                # in all keys of this outline, the numbers are in the same order
                self._templates[outline] = _NUMBER.sub("#", name)
            return name
        for number in numbers:
            text = text.replace("#", number, 1)
        return text

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor of the model is a buffer, which is not trained."""
        known = None if self.family is None or self.family.read(name) is None else self.family.match([name]).get(name)
        return name.rpartition(".")[2] in _BUFFERS if known is None else known.buffer

    def registration_orders(self, names: Iterable[str]) -> list[list[str]]:
        """Possible orders in which the model registered its parameters; none if its family is unknown."""
        if self.family is None:
            return []
        local = self.sort(names)
        fused = local
        for norm, module in _FUSED_NORMS:
            fused = _move_norms(fused, norm, module)
        return [local, _move_norms(local, *_FUSED_NORMS[0]), fused]

    def sort(self, names: Iterable[str]) -> list[str]:
        """Names in the order of registration."""
        return list(names) if self.family is None else self.family.sort_canonical(names)


def name_tensors(
    shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, object], options: SourceOptions
) -> DistNames:
    """Names for the tensors of a model, by its keys and their shapes.

    Raises FamilyError naming all keys without a rule, when the user named the family.
    """
    samples = {(_NUMBER.sub("#", key), shape): key for key, shape in shapes.items()}
    few = {key: shape for (_, shape), key in samples.items()}
    try:
        family, reasons = choose_family(names=list(few), shapes=few, arguments=arguments, options=options)
    except UnknownFamilyError as error:
        first, *nearest = (line.strip() for line in str(error).splitlines())
        reason = "; ".join((first.rstrip(":"), *nearest[:1], *nearest[1:][-1:]))
        return DistNames(None, (f"names are those of the file, because the model family is not known: {reason}",))
    full_keys = dict.fromkeys(parse_model_key(key).full_key for key in few)
    unknown = [key for key in full_keys if not family.ignores(key) and family.read(key) is None]
    family.match(unknown)  # raises: a family chosen by evidence has a rule for every name, so the user named this one
    return DistNames(family, (f"model family {family.name}: {'; '.join(reasons)}",))


def _move_norms(names: list[str], norm: str, module: str) -> list[str]:
    """`names` with the norms of every layer moved right before the parameters of `module` of that layer."""
    norms: dict[str, list[str]] = {}
    for name in names:
        layer, separator, _ = name.rpartition(norm)
        if separator and layer.endswith("."):
            norms.setdefault(layer, []).append(name)
    moved = set(chain.from_iterable(norms.values()))
    ordered = []
    for name in names:
        layer, separator, _ = name.partition(module)
        if separator:
            ordered += norms.pop(layer, [])
        if name not in moved:
            ordered.append(name)
    return ordered + list(chain.from_iterable(norms.values()))
