"""torch_dist: a checkpoint that Megatron loads at any layout, with fully reshardable optimizer states (core_v0.16).

    iter_0001000/__0_0.distcp ...      chunks of tensors, one per parameter and tensor-parallel rank, and small objects
    iter_0001000/.metadata             where they lie
    iter_0001000/metadata.json         which backend reads it
    iter_0001000/common.pt             arguments, parameter groups, scheduler, iteration

`common.pt` and the long form of metadata.json are those of megatron-core up to 0.18; 0.19 reads them too. Keys say in
which stacked tensor, and where in it, a parameter is stored:

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
from functools import lru_cache

from ucp.core.index import WEIGHT
from ucp.core.layout import Layout, place
from ucp.core.region import Box, RegionPair, intersect
from ucp.core.target import Literal, OutputFile
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import FamilyError
from ucp.io.dcp.emit import DcpDraft, NewChunk
from ucp.io.torch_file.draft import Drafted, FileDraft
from ucp_formats.megatron.mesh import with_source
from ucp_formats.megatron.names import COMMON, METADATA, GridPlace
from ucp_formats.megatron.write.arguments import namespace
from ucp_formats.megatron.write.model import Model, ModelTensor, TargetRun

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
    names = model.family.find_spelling(own.name, "torch_dist" if style.stacked else "torch_dist_layers")[1]
    if style.norms is not Norms.RENAMED and len(names) == 1 and own.expert is None:
        before_experts = ".pre_mlp_layernorm." in own.name and own.layer in model.expert_layers
        keeps_name = style.norms is Norms.APART or before_experts
        name = own.name if keeps_name else model.family.to_style(own.name, "te")
        names = (stacked_key(name, layer=style.stacked),)
    layer, expert = own.layer, own.expert
    lead = ((layer, model.layers),) if style.stacked and layer is not None else ()
    if expert is not None:
        lead = (*lead, (expert, model.experts))
    return tuple(
        StoredPart(key=key, lead=lead, box=box) for key, box in zip(names, _boxes(own, len(names)), strict=True)
    )


def _boxes(own: ModelTensor, parts: int) -> tuple[Box, ...]:
    """The whole, or the blocks that its rule cuts one by one."""
    if parts == 1:
        return (Box.full(own.shape),)
    layout = own.match.layout(axes={"tp": 1, "etp": 1}, global_shape=own.shape)
    pairs = [axis.pattern.regions(own.shape, 1, 0) for axis in layout.axes]
    boxes = tuple(pair.global_box for pair in max(pairs, key=len, default=()))
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
            head, _, last = part.key.rpartition(".")
            module = head if last == "weight" or last.startswith("layer_norm") else head.removesuffix(".weight")
            seen[_extra_key(module, part.lead)] = None
            if ".self_attention." in part.key:
                core = f"{part.key.partition('.self_attention.')[0]}.self_attention.core_attention"
                seen[_extra_key(core, part.lead)] = None
    yield from seen


def _extra_key(module: str, lead: tuple[tuple[int, int], ...]) -> str:
    at = ".".join(str(position) for position, _ in lead) or "0"
    of = ".".join(str(length) for _, length in lead) or "1"
    return f"{module}._extra_state/shard_{at}_{of}"


_METADATA = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    b'"common_backend": "torch", "common_backend_version": 1}'
)
_SHARDING = "fully_reshardable"
_WHOLE = Layout()


def dist_places(topology: Topology) -> tuple[GridPlace, ...]:
    """Ranks that random states are kept of: one per pipeline stage and tensor-parallel rank."""
    return tuple(GridPlace(tp=tp, pp=pp, ep=0) for pp in range(topology.pp) for tp in range(topology.tp))


def plan_dist(own: TargetRun, folder: str) -> tuple[Drafted, ...]:
    """The files in `folder`. Raises FamilyError when a parameter has no name in torch_dist."""
    draft = DcpDraft(folder)
    style = key_style(own.arguments)
    degrees = {"tp": own.topology.tp, "etp": own.topology.expert_tp}
    for tensor in own.model.tensors:
        layout = _WHOLE
        if any(degrees[axis] > 1 for axis in tensor.match.axes(degrees)):
            layout = tensor.match.layout(axes=degrees, global_shape=tensor.shape)
            layout = Layout(with_source(layout, f"family {own.model.family.name}"))
        for part in stored_parts(tensor, own.model, style):
            for key, state, dtype in _stored_states(own, tensor, part.key):
                chunks = list(_chunks(tensor, part, state, dtype, layout))
                draft.tensor(key, dtype, part.shape, chunks)
    draft.values(extra_state_keys(own.model, style), [None])
    pp, tp = own.topology.pp, own.topology.tp
    for at, value in own.random.items():
        draft.value(f"rng_state/shard_{at.pp}.{at.tp}_{pp}.{tp}", [value])
    common = FileDraft(f"{folder}/{COMMON}")
    metadata = OutputFile(path=f"{folder}/{METADATA}", nbytes=len(_METADATA), literals=(Literal(0, _METADATA),))
    return (*draft.finish(), common.finish(common.carried(_common(own))), Drafted(metadata, ()))


def _stored_states(own: TargetRun, tensor: ModelTensor, key: str) -> Iterator[tuple[str, str, DType]]:
    """Key, state and type of everything that is stored of a tensor: the model's own weight, then the optimizer's."""
    yield key, WEIGHT, tensor.dtype
    if not own.is_optimized(tensor):
        return
    master = "param" if own.distributed else "fp32_param"
    yield f"optimizer.state.{master}.{key}", WEIGHT, DType.FLOAT32
    for state, dtype in tensor.states.items():
        if state != WEIGHT:
            yield f"optimizer.state.{state}.{key}", state, DType(own.dtypes.get(state, dtype))


def _chunks(tensor: ModelTensor, part: StoredPart, state: str, dtype: DType, layout: Layout) -> Iterator[NewChunk]:
    """One chunk per box that a rank of the run holds by `layout`."""
    lead = tuple(at for at, _ in part.lead)
    for box in _boxes_of_ranks(layout, tensor.shape):
        pair = _shared(box, part.box)
        if pair is None:
            continue
        offsets = tuple(a - b for a, b in zip(pair.global_box.offsets, part.box.offsets, strict=True))
        sizes = pair.local.sizes
        parts = tensor.parts((pair,), sizes, state, dtype, layout)
        yield NewChunk(offsets=(*lead, *offsets), sizes=(*((1,) * len(lead)), *sizes), parts=parts)


@lru_cache(maxsize=1 << 12)
def _shared(box: Box, part: Box) -> RegionPair | None:
    """What two boxes have in common, one object for all tensors that are cut alike."""
    shared = intersect(box, part)
    return None if shared is None else RegionPair(shared, Box.full(shared.sizes))


@lru_cache(maxsize=1 << 12)
def _boxes_of_ranks(layout: Layout, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Boxes of a tensor that ranks hold under a layout."""
    placed = (own for coords in layout.ranks() for own in place(layout, shape, coords=coords))
    return tuple(dict.fromkeys(own.box for own in placed if own.replica == 0 and own.box.numel))


def _common(own: TargetRun) -> dict[str, object]:
    """What all ranks have in common."""
    content: dict[str, object] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if own.distributed and own.chain:
        content = {"distrib_optim_sharding_type": _SHARDING, **content}
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    every: list[dict[str, object]] = []  # their groups name no parameters: Megatron takes those of the run
    for groups in own.chain:
        if own.distributed:
            inner: dict[str, object] = {"param_groups": [group.entry() for group in groups]}
            every.append({"optimizer": inner, "param_state_sharding_type": _SHARDING, **own.scaler})
            continue
        step = next((group.step for group in groups if group.step is not None), None)
        state = {} if step is None else {"common_step": step}
        every.append({"optimizer": {"state": state, "param_groups": [dict(g.hyper) for g in groups]}, **own.scaler})
    optimizer = {"optimizer": every[0] if len(every) == 1 else dict(enumerate(every))} if every else {}
    return {"args": namespace(own.arguments), **own.common, **optimizer, "content_metadata": content}
