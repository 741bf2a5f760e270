"""The model of a rank, one chunk or several, as names and parts of the whole.

Names are those that the readers give to checkpoints of the same modules: the keys that Megatron would save are
understood by the rules of the family, which is chosen by all ranks together, for a stage has but some of the keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import pattern
from ucp.core.layout import AxisLayout, Layout
from ucp.core.region import Box, RegionPair
from ucp.errors import UnsupportedError
from ucp.families.family import distinct_shapes
from ucp.live.adapters import LiveModel
from ucp.live.model.module import dtype_of
from ucp.live.parts import LivePart, LiveTensor
from ucp.live.run.ranks import Ranks, together
from ucp_formats.megatron.live.sharded import Sharded, sharded_tensors
from ucp_formats.megatron.torch_dist.names import DistNames, names_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["describe_chunks", "unwrapped"]

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
    models = together(ranks, lambda: [unwrapped(chunk) for chunk in chunks])
    found = together(ranks, lambda: [own for model in models for own in sharded_tensors(model)])
    names = _names(found, models, ranks)
    tensors = together(ranks, lambda: _live(found, names))
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


def _names(found: Iterable[Sharded], models: Sequence[nn.Module], ranks: Ranks) -> DistNames:
    """How keys are understood, from those of all ranks."""
    own = distinct_shapes({key: shape for one in found for key, shape in one.shapes.items()})
    arguments = _arguments(models[0])
    every: dict[str, tuple[int, ...]] = {}
    for told in ranks.share(own):
        every |= told
    return together(ranks, lambda: names_of(every, arguments, SourceOptions()))


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
    key = names.understood(own.key)
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
    whole = Box.whole(local)
    if own.pairs == (RegionPair(whole, whole),) and own.global_shape == local and not own.is_padded:
        return LivePart.whole(local)
    held = AxisLayout(_PLACE, 1, pattern("pieces", held=(own.pairs,)), "sharded_state_dict of the module")
    return LivePart(
        local_shape=local,
        layout=Layout((held,)),
        coords={_PLACE: 0},
        global_shape=own.global_shape,
        is_padded=own.is_padded,
    )
