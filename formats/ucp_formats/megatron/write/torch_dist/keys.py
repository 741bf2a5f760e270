"""Keys of torch_dist: under which name, and where in which stacked tensor, a parameter of the model is stored.

    decoder.layers.self_attention.linear_qkv.weight          [layers, out, in]           layers that are all alike
    decoder.layers.mlp.experts.experts.linear_fc1.weight     [layers, experts, out, in]
    decoder.layers.7.mlp.experts.experts.linear_fc1.weight   [experts, out, in]          layers that differ

Which of the two it is, follows from the configuration of the run, not from the model: TransformerBlock.
sharded_state_dict of megatron-core 0.16 takes a layer's number into the key when `moe_layer_freq` or
`linear_attention_freq` is a list or more than 1, for heterogeneous blocks, and in hybrid models.

>>> stacked_key("decoder.layers.7.mlp.linear_fc2.weight", layer=True)
'decoder.layers.mlp.linear_fc2.weight'
>>> stacked_key("decoder.layers.7.mlp.experts.local_experts.3.linear_fc2.weight", layer=False)
'decoder.layers.7.mlp.experts.experts.linear_fc2.weight'
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ucp.core.region import Box
from ucp.errors import FamilyError
from ucp_formats.megatron.write.model import Model, ModelTensor

__all__ = ["KeyStyle", "Norms", "StoredPart", "extra_state_keys", "key_style", "stacked_key", "stored_parts"]

_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)\d+$")
_FREQUENCIES = ("moe_layer_freq", "linear_attention_freq")
_HYBRID = ("hybrid_layer_pattern", "hybrid_override_pattern")
_HETEROGENEOUS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")


class Norms(StrEnum):
    """What becomes of the name of a norm that stands before a linear layer."""

    FUSED = "fused"
    """Modules of Transformer Engine hold both; before experts the norm stays apart."""
    RENAMED = "renamed"
    """Specs of GPT layers with megatron-core's own modules rename it as if it were fused, before experts too."""
    APART = "apart"
    """It keeps its own: hybrid models of megatron-core's own modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStyle:
    """How a run names what it saves."""

    stacked: bool
    """Whether layers count a leading dim."""
    norms: Norms
    """How norms are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A parameter, or one of the tensors it is stored as, in torch_dist."""

    key: str
    """Name of the stored tensor."""
    lead: tuple[tuple[int, int], ...]
    """Position and length of each leading dim that counts layers or experts, outermost first."""
    box: Box
    """Which elements of the parameter it is."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dim of the stored tensor."""
        return (*(length for _, length in self.lead), *self.box.sizes)


def stacked_key(name: str, *, layer: bool) -> str:
    """The name without the number of its expert, and of its layer too, if `layer`."""
    if layer:
        name = _LAYER.sub("decoder.layers.", name)
    name = _EXPERT.sub(".experts.experts.", name)
    return _GROUPED_EXPERT.sub(r".experts.experts.\1.\2", name)


def key_style(arguments: Mapping[str, object]) -> KeyStyle:
    """How a run of these arguments names what it saves; modules are Transformer Engine's where they do not say."""
    hybrid = any(arguments.get(name) for name in _HYBRID)
    norms = Norms.FUSED
    if arguments.get("transformer_impl") == "local":
        norms = Norms.APART if hybrid else Norms.RENAMED
    uneven = any(arguments.get(name) for name in _HETEROGENEOUS)
    values = [arguments.get(name) for name in _FREQUENCIES]
    alike = not any(isinstance(own, list | tuple | str) or (isinstance(own, int) and own > 1) for own in values)
    return KeyStyle(stacked=alike and not hybrid and not uneven, norms=norms)


def stored_parts(own: ModelTensor, model: Model, style: KeyStyle) -> tuple[StoredPart, ...]:
    """What a parameter is stored as. Raises FamilyError when it has no name in torch_dist."""
    names = model.family.stored_as(own.name, "torch_dist" if style.stacked else "torch_dist_layers")[1]
    if style.norms is not Norms.RENAMED and len(names) == 1 and own.expert is None:
        names = (stacked_key(_module_name(own, model, style.norms), layer=style.stacked),)
    layer, expert = own.layer, own.expert
    lead = ((layer, model.layers),) if style.stacked and layer is not None else ()
    if expert is not None:
        lead = (*lead, (expert, model.experts))
    return tuple(
        StoredPart(key=key, lead=lead, box=box) for key, box in zip(names, _boxes(own, len(names)), strict=True)
    )


def _module_name(own: ModelTensor, model: Model, norms: Norms) -> str:
    """Name in the state_dict of the run's modules."""
    before_experts = ".pre_mlp_layernorm." in own.name and own.layer in model.expert_layers
    return own.name if norms is Norms.APART or before_experts else model.family.styled(own.name, "te")


def _boxes(own: ModelTensor, parts: int) -> tuple[Box, ...]:
    """The whole, or the blocks that its rule cuts one by one."""
    if parts == 1:
        return (Box.whole(own.shape),)
    layout = own.match.layout(axes={"tp": 1, "etp": 1}, global_shape=own.shape)
    pairs = [axis.pattern.regions(own.shape, 1, 0) for axis in layout.axes]
    boxes = tuple(pair.whole for pair in max(pairs, key=len, default=()))
    if len(boxes) != parts:
        raise FamilyError(
            f"{own.name} is {parts} tensors in torch_dist, but its rule has {len(boxes)} blocks to cut it into. "
            f"Mend the rule {own.match.rule} of {own.match.rule.source}"
        )
    return boxes


def extra_state_keys(model: Model, style: KeyStyle) -> Iterator[str]:
    """Keys under which modules of Megatron ask for state of their own; a key that no module asks for does no harm.

    Linear layers have it with megatron-core's own modules, norms and attention too with Transformer Engine's.
    """
    seen: dict[str, None] = {"output_layer._extra_state/shard_0_1": None}
    for own in model.tensors:
        if not own.name.endswith(".weight") or own.name.startswith("embedding."):
            continue
        for part in stored_parts(own, model, style):
            seen[_extra_key(_module_of(part.key), part.lead)] = None
            if ".self_attention." in part.key:
                core = f"{part.key.partition('.self_attention.')[0]}.self_attention.core_attention"
                seen[_extra_key(core, part.lead)] = None
    yield from seen


def _module_of(key: str) -> str:
    head, _, last = key.rpartition(".")
    return head if last == "weight" or last.startswith("layer_norm") else head.removesuffix(".weight")


def _extra_key(module: str, lead: tuple[tuple[int, int], ...]) -> str:
    at = ".".join(str(position) for position, _ in lead) or "0"
    of = ".".join(str(length) for _, length in lead) or "1"
    return f"{module}._extra_state/shard_{at}_{of}"
