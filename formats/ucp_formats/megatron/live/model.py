"""Where the tensors of a module of megatron-core lie in the whole model, as the module itself says.

`sharded_state_dict` is what Megatron saves and loads by: for every tensor a key, the shape of the whole and the offset
of this rank's part, in pieces where a fused tensor (gate and up, the projections of Mamba) is cut piece by piece.

The model of a rank, one chunk or several, as names and parts of the whole.

Names are those that the readers give to checkpoints of the same modules: the keys that Megatron would save are
understood by the rules of the family, which is chosen by all ranks run_together, for a stage has but some of the keys.
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
from ucp.errors import LoadError, UnsupportedError, listed
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

_NO_TENSOR = "_extra_state"
"""End of the names of what modules of Transformer Engine keep beside tensors: bytes, and rank-local."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """A parameter or buffer of a module, and its place."""

    local_name: str
    """Name in the module."""
    tensor: torch.Tensor
    """The parameter or buffer itself."""
    shapes: Mapping[str, Shape]
    """Key to the shape of what is saved under it, stacked dims counted; several keys where it is saved in parts."""
    stacked: Shape
    """Which layer, and which expert, it is, as far as its key counts them in leading dims."""
    global_shape: Shape
    """Shape of the whole, without these."""
    pairs: tuple[RegionPair, ...]
    """What of the whole the rank holds."""
    is_padded: bool
    """Whether the rows of the whole are padded, to a number that depends on the run."""

    @property
    def key(self) -> str:
        """The first of its keys."""
        return next(iter(self.shapes))


def sharded_tensors(module: torch.nn.Module) -> list[Sharded]:
    """Parameters and persistent buffers of a MegatronModule.

    Raises LoadError for those without memory, UnsupportedError for what has no one place.
    """
    blank = [name for name, own in module.named_parameters() if own.is_meta]
    if blank:
        raise LoadError(
            f"expected parameters that have memory to load into; these are on the meta device:\n{listed(blank)}\n"
            "build the model without init_model_with_meta_device"
        )
    by_tensor = {id(value.data): value for value in _sharded_values(module)}
    found, problems, seen = [], [], set()
    for name, own in module.state_dict(keep_vars=True).items():
        if name.endswith(_NO_TENSOR) or own is None or id(own) in seen:
            continue
        seen.add(id(own))
        try:
            found.append(_placed(name, own, by_tensor.get(id(own))))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise UnsupportedError(
            "expected tensors of megatron-core, each of which is a part of one tensor of the whole model; got "
            f"others:\n{listed(problems)}\nBuild experts as SequentialMLP or TEGroupedMLP, and give modules of your "
            "own a sharded_state_dict"
        )
    return found


def _sharded_values(module: Any) -> Iterator[Any]:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    metadata = None
    if parallel_state.model_parallel_is_initialized():
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    sharded, _ = extract_sharded_tensors_and_factories(module.sharded_state_dict(metadata=metadata))
    yield from nested_values(sharded)


def _placed(name: str, tensor: torch.Tensor, value: Any) -> Sharded:
    """The place of one tensor. `value`: ShardedTensor or ShardedTensorFactory. Raises ValueError."""
    if value is None:
        raise ValueError("the sharded_state_dict of its module does not have it")
    shapes: dict[str, Shape] = {}
    starts: dict[str, int] = {}
    rows = 0
    pairs: list[RegionPair] = []
    stacked: set[Shape] = set()
    for part in _parts(value, tensor.detach()):
        lead = part.prepend_axis_num
        whole, offsets = tuple(part.global_shape[lead:]), tuple(part.global_offset[lead:])
        if part.key not in shapes:  # parts of a fused tensor follow one another along dim 0
            shapes[part.key], starts[part.key] = tuple(part.global_shape), rows
            rows += whole[0] if whole else 0
        if starts[part.key]:
            offsets = (starts[part.key] + offsets[0], *offsets[1:])
        stacked.add(tuple(part.global_offset[:lead]))
        sizes = tuple(part.data.shape)
        pairs.append(RegionPair(Box(offsets, sizes), Box(_inside(tensor, part.data), sizes)))
    if len(stacked) != 1:
        raise ValueError("it holds several experts in one tensor")
    return Sharded(
        local_name=name,
        tensor=tensor,
        shapes=shapes,
        stacked=stacked.pop(),
        global_shape=(rows, *whole[1:]) if whole else (),
        pairs=tuple(pairs),
        is_padded=part.allow_shape_mismatch,
    )


def _parts(value: Any, tensor: torch.Tensor) -> Iterator[Any]:
    """The ShardedTensors that a tensor is saved as."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(value, ShardedTensorFactory):
        yield from nested_values({"built": replace(value, data=tensor).build()})
    else:
        yield replace(value, data=tensor, dtype=tensor.dtype)


def _inside(tensor: torch.Tensor, part: torch.Tensor) -> Shape:
    """Where a view starts in its tensor. Raises ValueError for one that lies otherwise."""
    if part.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or part.stride() != tensor.stride():
        raise ValueError("it is saved in another form than it has")
    left, at = int(part.storage_offset() - tensor.storage_offset()), []
    for stride in tensor.stride():
        step, left = divmod(left, stride)
        at.append(step)
    return tuple(at)


_PLACE = "place"
"""The axis of a layout that says what this rank holds, and nothing of others."""
_FULLY_SHARDED = "FullyShardedDataParallel"


def unwrapped(chunk: nn.Module) -> nn.Module:
    """The model itself, out of DistributedDataParallel and Float16Module. Raises UnsupportedError for FSDP."""
    from torch import nn

    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        if _FULLY_SHARDED in type(chunk).__name__:
            raise UnsupportedError(
                f"expected a model in DistributedDataParallel of megatron-core, or in no wrapper; got "
                f"{type(chunk).__name__}, whose shards are not loaded yet. Convert with --to megatron, and load the "
                "result as Megatron does"
            )
        chunk = inner
    return chunk


def describe_chunks(chunks: Sequence[nn.Module], ranks: Ranks) -> LiveModel:
    """All tensors of this rank. Collective."""
    models = run_together(ranks, lambda: [unwrapped(chunk) for chunk in chunks])
    found = run_together(ranks, lambda: [own for model in models for own in sharded_tensors(model)])
    shapes = distinct_shapes({key: shape for one in found for key, shape in one.shapes.items()})
    every = {key: shape for told in ranks.share(shapes) for key, shape in told.items()}  # a stage has some of the keys
    names = run_together(ranks, lambda: name_tensors(every, _arguments(models[0]), SourceOptions()))
    tensors = run_together(ranks, lambda: _live(found, names))
    return LiveModel(
        tensors=tensors,
        handles={live.name: own.tensor for live, own in zip(tensors, found, strict=True)},
        owners={id(own.tensor): live.name for live, own in zip(tensors, found, strict=True)},
        notes=() if names.family else names.notes,
    )


def _live(found: Iterable[Sharded], names: DistNames) -> tuple[LiveTensor, ...]:
    held: Counter[str] = Counter()
    tensors = []
    for own in found:
        name = _name(own, names)
        held[name] += 1
        again = (f"{name}#{held[name]}",) if held[name] > 1 else ()  # a tied copy in another chunk
        tensors.append(LiveTensor(names=(*again, name), dtype=dtype_of(own.tensor), part=_part(own)))
    return tuple(tensors)


def _arguments(model: Any) -> Mapping[str, object]:
    """What the run would record of its model, as far as names are chosen by it."""
    config = getattr(model, "config", None)
    told = {key: value for key, value in vars(config).items() if isinstance(value, bool | int | float | str)}
    found = {
        "num_experts": told.get("num_moe_experts"),
        "position_embedding_type": getattr(model, "position_embedding_type", None),
    }
    tied = getattr(model, "share_embeddings_and_output_weights", None)
    if tied is not None:
        found["untie_embeddings_and_output_weights"] = not tied
    return told | {key: value for key, value in found.items() if value is not None}


def _name(own: Sharded, names: DistNames) -> str:
    key = names.parse(own.key)
    if len(key.stacked) != len(own.stacked):
        raise UnsupportedError(
            f"expected {own.key} to count {' and '.join(key.stacked) or 'nothing'} in leading dims; it has "
            f"{len(own.stacked)} of them. The layers of the model are not those of megatron-core"
        )
    name = key.template
    for what, number in zip(key.stacked, own.stacked, strict=True):
        name = name.replace(f"{{{what}}}", str(number))
    return name


def _part(own: Sharded) -> LivePart:
    local = tuple(own.tensor.shape)
    whole = Box.full(local)
    if own.pairs == (RegionPair(whole, whole),) and own.global_shape == local and not own.is_padded:
        return LivePart.full(local)
    held = AxisLayout(_PLACE, 1, pattern("pieces", held=(own.pairs,)), "sharded_state_dict of the module")
    return LivePart(
        local_shape=local,
        layout=Layout((held,)),
        coords={_PLACE: 0},
        global_shape=own.global_shape,
        is_padded=own.is_padded,
    )
