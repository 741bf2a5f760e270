"""Write torch_dist: a checkpoint that Megatron loads at any topology, with fully reshardable optimizer states.

    iter_0001000/__0_0.distcp ...      chunks of tensors, one per parameter and tensor-parallel rank, and small objects
    iter_0001000/.metadata             where in these files they are
    iter_0001000/metadata.json         which backend reads it
    iter_0001000/common.pt             arguments, parameter groups, scheduler, iteration

`common.pt` and the long form of metadata.json are those of megatron-core up to 0.18; 0.19 reads them too. Parameters
are stored in stacked tensors:

    decoder.layers.self_attention.linear_qkv.weight          [layers, out, in]           layers that are all alike
    decoder.layers.mlp.experts.experts.linear_fc1.weight     [layers, experts, out, in]
    decoder.layers.7.mlp.experts.experts.linear_fc1.weight   [experts, out, in]          layers that differ

The arguments of the run decide whether layers are stacked: megatron-core 0.16 (TransformerBlock.sharded_state_dict) has
the layer in the key if `moe_layer_freq` or `linear_attention_freq` is a list or more than 1, for heterogeneous blocks,
and in hybrid models.

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
from ucp.io.torch_file.draft import FileDraft, FinishedFile
from ucp_formats.megatron.mesh import with_source
from ucp_formats.megatron.names import COMMON, METADATA, GridPlace
from ucp_formats.megatron.write.arguments import namespace
from ucp_formats.megatron.write.model import TargetModel, TargetRun, TargetTensor

_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)\d+$")
_FREQUENCIES = ("moe_layer_freq", "linear_attention_freq")
_HYBRID = ("hybrid_layer_pattern", "hybrid_override_pattern")
_HETEROGENEOUS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")


class Norms(StrEnum):
    """How the key of a norm before a linear layer is named."""

    FUSED = "fused"
    """Transformer Engine: as part of the linear layer, except before experts."""
    RENAMED = "renamed"
    """GPT with megatron-core's own modules: as if it were part of the linear layer, before experts too."""
    SEPARATE = "separate"
    """Hybrid models with megatron-core's own modules: as a module of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStyle:
    """Keys that a run saves tensors under."""

    stacked: bool
    """Whether layers are stacked along a leading dim."""
    norms: Norms
    """Names of norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One of the tensors that a parameter is stored as; often the only one."""

    key: str
    """Name of the stored tensor."""
    lead: tuple[tuple[int, int], ...]
    """Index and length of each leading dim that stacks layers or experts, outermost first."""
    box: Box
    """Elements of the parameter that it holds."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dim of the stored tensor."""
        return (*(length for _, length in self.lead), *self.box.sizes)


def stacked_key(name: str, *, layer: bool) -> str:
    """The name without the number of its expert. `layer`: remove the number of its layer, too."""
    if layer:
        name = _LAYER.sub("decoder.layers.", name)
    name = _EXPERT.sub(".experts.experts.", name)
    return _GROUPED_EXPERT.sub(r".experts.experts.\1.\2", name)


def key_style(arguments: Mapping[str, object]) -> KeyStyle:
    """Keys of a run with these arguments; the default modules are Transformer Engine's."""
    hybrid = any(arguments.get(name) for name in _HYBRID)
    norms = Norms.FUSED
    if arguments.get("transformer_impl") == "local":
        norms = Norms.SEPARATE if hybrid else Norms.RENAMED
    uneven = any(arguments.get(name) for name in _HETEROGENEOUS)
    values = [arguments.get(name) for name in _FREQUENCIES]
    alike = not any(isinstance(freq, list | tuple | str) or (isinstance(freq, int) and freq > 1) for freq in values)
    return KeyStyle(stacked=alike and not hybrid and not uneven, norms=norms)


def stored_parts(tensor: TargetTensor, model: TargetModel, style: KeyStyle) -> tuple[StoredPart, ...]:
    """The tensors that a parameter is stored as. Raises FamilyError if it has no name in torch_dist."""
    names = model.family.find_spelling(tensor.name, "torch_dist" if style.stacked else "torch_dist_layers")[1]
    layer, expert = tensor.layer, tensor.expert
    if style.norms is not Norms.RENAMED and len(names) == 1 and expert is None:
        before_experts = ".pre_mlp_layernorm." in tensor.name and layer in model.expert_layers
        keeps_name = style.norms is Norms.SEPARATE or before_experts
        name = tensor.name if keeps_name else model.family.to_style(tensor.name, "te")
        names = (stacked_key(name, layer=style.stacked),)
    lead = ((layer, model.layers),) if style.stacked and layer is not None else ()
    if expert is not None:
        lead = (*lead, (expert, model.experts))
    boxes = _boxes(tensor, len(names))
    return tuple(StoredPart(key=key, lead=lead, box=box) for key, box in zip(names, boxes, strict=True))


def _boxes(tensor: TargetTensor, count: int) -> tuple[Box, ...]:
    """The `count` blocks that the rule shards separately; for one block, the full tensor."""
    if count == 1:
        return (Box.full(tensor.shape),)
    layout = tensor.match.layout(axes={"tp": 1, "etp": 1}, global_shape=tensor.shape)
    pairs = [axis.pattern.regions(tensor.shape, 1, 0) for axis in layout.axes]
    boxes = tuple(pair.global_box for pair in max(pairs, key=len, default=()))
    if len(boxes) != count:
        raise FamilyError(
            f"{tensor.name} is {count} tensors in torch_dist, but its rule splits it into {len(boxes)} blocks. "
            f"Fix the rule {tensor.match.rule} of {tensor.match.rule.source}"
        )
    return boxes


def extra_state_keys(model: TargetModel, style: KeyStyle) -> Iterator[str]:
    """Keys of extra states that modules may look for: linear layers, with Transformer Engine also norms and attention.

    Megatron ignores keys that no module looks for.
    """
    keys: dict[str, None] = {"output_layer._extra_state/shard_0_1": None}
    for tensor in model.tensors:
        if not tensor.name.endswith(".weight") or tensor.name.startswith("embedding."):
            continue
        for part in stored_parts(tensor, model, style):
            indices = ".".join(str(index) for index, _ in part.lead) or "0"
            lengths = ".".join(str(length) for _, length in part.lead) or "1"
            shard = f"_extra_state/shard_{indices}_{lengths}"
            head, _, last = part.key.rpartition(".")
            module = head if last == "weight" or last.startswith("layer_norm") else head.removesuffix(".weight")
            keys[f"{module}.{shard}"] = None
            if ".self_attention." in part.key:
                keys[f"{part.key.partition('.self_attention.')[0]}.self_attention.core_attention.{shard}"] = None
    yield from keys


_METADATA = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    b'"common_backend": "torch", "common_backend_version": 1}'
)
_SHARDING = "fully_reshardable"


def dist_places(topology: Topology) -> tuple[GridPlace, ...]:
    """Ranks whose RNG states are saved: one per pipeline stage and tensor-parallel rank."""
    return tuple(GridPlace(tp=tp, pp=pp, ep=0) for pp in range(topology.pp) for tp in range(topology.tp))


def plan_dist(run: TargetRun, folder: str) -> tuple[FinishedFile, ...]:
    """The files in `folder`. Raises FamilyError if a parameter has no name in torch_dist."""
    draft = DcpDraft(folder)
    style = key_style(run.arguments)
    degrees = {"tp": run.topology.tp, "etp": run.topology.expert_tp}
    for tensor in run.model.tensors:
        layout = Layout()
        if any(degrees[axis] > 1 for axis in tensor.match.axes(degrees)):
            layout = tensor.match.layout(axes=degrees, global_shape=tensor.shape)
            layout = Layout(with_source(layout, f"family {run.model.family.name}"))
        for part in stored_parts(tensor, run.model, style):
            for key, state, dtype in _stored_states(run, tensor, part.key):
                chunks = list(_chunks(tensor, part, state, dtype, layout))
                draft.add_tensor(key, dtype, part.shape, chunks)
    draft.add_values(extra_state_keys(run.model, style), [None])
    pp, tp = run.topology.pp, run.topology.tp
    for rank, value in run.rng_states.items():
        draft.add_value(f"rng_state/shard_{rank.pp}.{rank.tp}_{pp}.{tp}", [value])
    common = FileDraft(f"{folder}/{COMMON}")
    metadata = OutputFile(path=f"{folder}/{METADATA}", nbytes=len(_METADATA), literals=(Literal(0, _METADATA),))
    return (*draft.finish(), common.finish(common.copy_extra(_common(run))), FinishedFile(metadata, ()))


def _stored_states(run: TargetRun, tensor: TargetTensor, key: str) -> Iterator[tuple[str, str, DType]]:
    """Key, state and type of each tensor to store: the model's weight, then the optimizer's states."""
    yield key, WEIGHT, tensor.dtype
    if not run.is_optimized(tensor):
        return
    master = "param" if run.is_distributed else "fp32_param"
    yield f"optimizer.state.{master}.{key}", WEIGHT, DType.FLOAT32
    for state, dtype in tensor.states.items():
        if state != WEIGHT:
            yield f"optimizer.state.{state}.{key}", state, DType(run.dtypes.get(state, dtype))


def _chunks(tensor: TargetTensor, part: StoredPart, state: str, dtype: DType, layout: Layout) -> Iterator[NewChunk]:
    """One chunk per box that a rank of the run holds by `layout`."""
    lead = tuple(index for index, _ in part.lead)
    for box in _boxes_of_ranks(layout, tensor.shape):
        pair = _intersect(box, part.box)
        if pair is None:
            continue
        offsets = tuple(a - b for a, b in zip(pair.global_box.offsets, part.box.offsets, strict=True))
        sizes = pair.local.sizes
        parts = (tensor.to_part((pair,), sizes, state, dtype, layout),)
        yield NewChunk(offsets=(*lead, *offsets), sizes=(*((1,) * len(lead)), *sizes), parts=parts)


@lru_cache(maxsize=1 << 12)
def _intersect(box: Box, other: Box) -> RegionPair | None:
    """The intersection, cached: tensors with equal boxes share one object."""
    shared = intersect(box, other)
    return None if shared is None else RegionPair(shared, Box.full(shared.sizes))


@lru_cache(maxsize=1 << 12)
def _boxes_of_ranks(layout: Layout, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Boxes of a tensor that ranks hold under a layout."""
    placed = (piece for coords in layout.ranks() for piece in place(layout, shape, coords=coords))
    return tuple(dict.fromkeys(piece.box for piece in placed if piece.replica == 0 and piece.box.numel))


def _common(run: TargetRun) -> dict[str, object]:
    """Content of `common.pt`."""
    content: dict[str, object] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if run.is_distributed and run.chain:
        content = {"distrib_optim_sharding_type": _SHARDING, **content}
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    optimizers: list[dict[str, object]] = []  # groups without members: Megatron takes those of the run
    for groups in run.chain:
        if run.is_distributed:
            inner: dict[str, object] = {"param_groups": [group.entry() for group in groups]}
            optimizers.append({"optimizer": inner, "param_state_sharding_type": _SHARDING, **run.grad_scaler})
            continue
        step = next((group.step for group in groups if group.step is not None), None)
        inner = {"state": {} if step is None else {"common_step": step}}
        inner["param_groups"] = [dict(group.hyper) for group in groups]
        optimizers.append({"optimizer": inner, **run.grad_scaler})
    entry = {"optimizer": optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers))} if optimizers else {}
    return {"args": namespace(run.arguments), **run.common, **entry, "content_metadata": content}
