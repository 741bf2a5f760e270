"""The tensors of a live megatron-core model, and their layout by the `sharded_state_dict` of its modules.

Megatron saves and loads by `sharded_state_dict`. It gives every tensor a key, its global shape and the offset of this
rank's part; a fused tensor (gate and up, the projections of Mamba) is given in several parts. The rules of the family
translate keys into canonical names, as they do for checkpoints. All ranks choose the family together, because a stage
has only some of the keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ucp.contract.plugins import pattern
from ucp.contract.protocols import SourceOptions
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box, RegionPair
from ucp.errors import LoadError, UnsupportedError, format_list
from ucp.families.family import distinct_shapes
from ucp.live.adapters import LiveModel
from ucp.live.model.module import dtype_of
from ucp.live.parts import LivePart, LiveTensor
from ucp.live.run.ranks import Ranks, run_together
from ucp_formats.megatron.torch_dist.keys import DistNames, name_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

Shape = tuple[int, ...]

_EXTRA_STATE = "_extra_state"
"""End of the keys under which modules of Transformer Engine keep bytes of one rank."""
_PLACE = "place"
"""Axis of a layout that covers this rank only."""
_FULLY_SHARDED = "FullyShardedDataParallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTensor:
    """A parameter or buffer of a module, and its place in the global tensor."""

    tensor: torch.Tensor
    """The parameter or buffer itself."""
    shapes: Mapping[str, Shape]
    """Key to the shape of the tensor saved under it, with stacked dims; several keys if it is saved in parts."""
    stacked: Shape
    """Its indices in the leading dims that stack layers and experts."""
    part: LivePart
    """The part of the global tensor, without these dims, that the rank holds."""


def _read_module(module: torch.nn.Module) -> list[ModuleTensor]:
    """Parameters and persistent buffers of a MegatronModule.

    Raises LoadError for parameters on the meta device, UnsupportedError for tensors that are not one part of one global
    tensor.
    """
    meta = [name for name, param in module.named_parameters() if param.is_meta]
    if meta:
        raise LoadError(
            f"expected parameters that have memory to load into; these are on the meta device:\n{format_list(meta)}\n"
            "build the model without init_model_with_meta_device"
        )
    sharded = {id(value.data): value for value in _sharded_values(module)}
    tensors: list[ModuleTensor] = []
    problems: list[str] = []
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name.endswith(_EXTRA_STATE) or tensor is None or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        try:
            tensors.append(_read_tensor(tensor, sharded.get(id(tensor))))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise UnsupportedError(
            "expected tensors of megatron-core, each a part of one global tensor of the model; got others:\n"
            f"{format_list(problems)}\nBuild experts as SequentialMLP or TEGroupedMLP, and give modules of your own a "
            "sharded_state_dict"
        )
    return tensors


def _sharded_values(module: Any) -> Iterator[Any]:
    """The ShardedTensors and ShardedTensorFactories of a module."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    metadata = None
    if parallel_state.model_parallel_is_initialized():
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    sharded, _ = extract_sharded_tensors_and_factories(module.sharded_state_dict(metadata=metadata))
    yield from nested_values(sharded)


def _read_tensor(tensor: torch.Tensor, value: Any) -> ModuleTensor:
    """A tensor and its place in the global tensor.

    `value`: ShardedTensor or ShardedTensorFactory of the tensor; None if there is none. Raises ValueError.
    """
    if value is None:
        raise ValueError("the sharded_state_dict of its module does not have it")
    shapes: dict[str, Shape] = {}
    starts: dict[str, int] = {}
    rows = 0
    pairs: list[RegionPair] = []
    stacked: set[Shape] = set()
    for part in _build_parts(value, tensor.detach()):
        lead = part.prepend_axis_num
        global_shape, offsets = tuple(part.global_shape[lead:]), tuple(part.global_offset[lead:])
        if part.key not in shapes:  # parts of a fused tensor follow one another along dim 0
            shapes[part.key], starts[part.key] = tuple(part.global_shape), rows
            rows += global_shape[0] if global_shape else 0
        if starts[part.key]:
            offsets = (starts[part.key] + offsets[0], *offsets[1:])
        stacked.add(tuple(part.global_offset[:lead]))
        sizes = tuple(part.data.shape)
        pairs.append(RegionPair(Box(offsets, sizes), Box(_offsets_in(tensor, part.data), sizes)))
    if len(stacked) != 1:
        raise ValueError("it holds several experts in one tensor")
    live_part = _live_part(
        tuple(tensor.shape),
        (rows, *global_shape[1:]) if global_shape else (),
        tuple(pairs),
        is_padded=part.allow_shape_mismatch,  # rows are padded to a number that depends on the run
    )
    return ModuleTensor(tensor=tensor, shapes=shapes, stacked=stacked.pop(), part=live_part)


def _live_part(local_shape: Shape, global_shape: Shape, pairs: tuple[RegionPair, ...], *, is_padded: bool) -> LivePart:
    full = Box.full(local_shape)
    if pairs == (RegionPair(full, full),) and global_shape == local_shape and not is_padded:
        return LivePart.full(local_shape)
    layout = Layout((AxisLayout(_PLACE, 1, pattern("pieces", held=(pairs,)), "sharded_state_dict of the module"),))
    coords = {_PLACE: 0}
    return LivePart(
        local_shape=local_shape, layout=layout, coords=coords, global_shape=global_shape, is_padded=is_padded
    )


def _build_parts(value: Any, tensor: torch.Tensor) -> Iterator[Any]:
    """The ShardedTensors that a tensor is saved as."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(value, ShardedTensorFactory):
        yield from nested_values({"built": replace(value, data=tensor).build()})
    else:
        yield replace(value, data=tensor, dtype=tensor.dtype)


def _offsets_in(tensor: torch.Tensor, view: torch.Tensor) -> Shape:
    """Offsets at which `view` starts in `tensor`. Raises ValueError for other memory or strides."""
    if view.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or view.stride() != tensor.stride():
        raise ValueError("the sharded_state_dict saves it in other memory or with other strides")
    remainder, offsets = int(view.storage_offset() - tensor.storage_offset()), []
    for stride in tensor.stride():
        offset, remainder = divmod(remainder, stride)
        offsets.append(offset)
    return tuple(offsets)


def _unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and Float16Module. Raises UnsupportedError for FSDP."""
    from torch import nn

    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        if _FULLY_SHARDED in type(chunk).__name__:
            raise UnsupportedError(
                f"expected a model in DistributedDataParallel of megatron-core, or in no wrapper; got "
                f"{type(chunk).__name__}, into which ucp cannot load yet. Convert with --to megatron, and load the "
                "result with Megatron"
            )
        chunk = inner
    return chunk


def describe_chunks(chunks: Sequence[nn.Module], ranks: Ranks) -> LiveModel:
    """All tensors of this rank. Collective."""
    models = run_together(ranks, lambda: [_unwrap(chunk) for chunk in chunks])
    local = run_together(ranks, lambda: [tensor for model in models for tensor in _read_module(model)])
    local_shapes = distinct_shapes({key: shape for tensor in local for key, shape in tensor.shapes.items()})
    shapes = {key: shape for rank_shapes in ranks.share(local_shapes) for key, shape in rank_shapes.items()}
    names = run_together(ranks, lambda: name_tensors(shapes, _model_arguments(models[0]), SourceOptions()))
    tensors = run_together(ranks, lambda: _name_local(local, names))
    pairs = list(zip(tensors, local, strict=True))
    return LiveModel(
        tensors=tensors,
        handles={live.name: entry.tensor for live, entry in pairs},
        owners={id(entry.tensor): live.name for live, entry in pairs},
        notes=() if names.family else names.notes,
    )


def _name_local(local: Iterable[ModuleTensor], names: DistNames) -> tuple[LiveTensor, ...]:
    """The tensors under their canonical names; a tied copy in another chunk has a number appended."""
    copies: Counter[str] = Counter()
    tensors = []
    for entry in local:
        name = _canonical_name(entry, names)
        copies[name] += 1
        numbered = (f"{name}#{copies[name]}",) if copies[name] > 1 else ()
        tensors.append(LiveTensor(names=(*numbered, name), dtype=dtype_of(entry.tensor), part=entry.part))
    return tuple(tensors)


def _model_arguments(model: Any) -> Mapping[str, object]:
    """The arguments of the run that the choice of a family depends on."""
    config = getattr(model, "config", None)
    arguments = {key: value for key, value in vars(config).items() if isinstance(value, bool | int | float | str)}
    translated = {
        "num_experts": arguments.get("num_moe_experts"),
        "position_embedding_type": getattr(model, "position_embedding_type", None),
    }
    tied = getattr(model, "share_embeddings_and_output_weights", None)
    if tied is not None:
        translated["untie_embeddings_and_output_weights"] = not tied
    return arguments | {key: value for key, value in translated.items() if value is not None}


def _canonical_name(entry: ModuleTensor, names: DistNames) -> str:
    first_key = next(iter(entry.shapes))
    key = names.parse(first_key)
    if len(key.stacked) != len(entry.stacked):
        raise UnsupportedError(
            f"expected {first_key} to have leading dims for {' and '.join(key.stacked) or 'nothing'}; it has "
            f"{len(entry.stacked)} leading dims. The layers of the model are not those of megatron-core"
        )
    name = key.template
    for field, number in zip(key.stacked, entry.stacked, strict=True):
        name = name.replace(f"{{{field}}}", str(number))
    return name
