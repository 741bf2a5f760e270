"""torch_dist: a checkpoint that Megatron loads at any layout, with fully reshardable optimizer states (core_v0.16).

    iter_0001000/__0_0.distcp ...      chunks of tensors, one per parameter and tensor-parallel rank, and small objects
    iter_0001000/.metadata             where they lie
    iter_0001000/metadata.json         which backend reads it
    iter_0001000/common.pt             arguments, parameter groups, scheduler, iteration

`common.pt` and the long form of metadata.json are those of megatron-core up to 0.18; 0.19 reads them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ucp.core.dtypes import DType
from ucp.core.layout import Layout, place
from ucp.core.names import WEIGHT
from ucp.core.region import Box, RegionPair, intersect
from ucp.core.target import Literal, OutputFile
from ucp.core.topology import Topology
from ucp.io.dcp.emit import DcpDraft, NewChunk
from ucp.io.torch_file.draft import Drafted, FileDraft
from ucp_formats.megatron.names import COMMON, METADATA, GridPlace
from ucp_formats.megatron.run.mesh import known
from ucp_formats.megatron.write.arguments.carried import namespace
from ucp_formats.megatron.write.groups import OptimizerGroup
from ucp_formats.megatron.write.model import ModelTensor
from ucp_formats.megatron.write.run import TargetRun
from ucp_formats.megatron.write.torch_dist.keys import StoredPart, extra_state_keys, key_style, stored_parts

__all__ = ["dist_places", "plan_dist"]

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
    for tensor in own.model.tensors:
        layout = _layout(tensor, own)
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
    for box in _boxes(layout, tensor.shape):
        pair = _shared(box, part.box)
        if pair is None:
            continue
        offsets = tuple(a - b for a, b in zip(pair.whole.offsets, part.box.offsets, strict=True))
        sizes = pair.local.sizes
        parts = tensor.parts((pair,), sizes, state, dtype, layout)
        yield NewChunk(offsets=(*lead, *offsets), sizes=(*((1,) * len(lead)), *sizes), parts=parts)


@lru_cache(maxsize=1 << 12)
def _shared(box: Box, part: Box) -> RegionPair | None:
    """What two boxes have in common, one object for all tensors that are cut alike."""
    shared = intersect(box, part)
    return None if shared is None else RegionPair(shared, Box.whole(shared.sizes))


def _layout(tensor: ModelTensor, own: TargetRun) -> Layout:
    """How a tensor lies over the tensor-parallel ranks of the run; without an axis where they are one."""
    degrees = {"tp": own.topology.tp, "etp": own.topology.expert_tp}
    if all(degrees[axis] == 1 for axis in tensor.match.axes(degrees)):
        return _WHOLE
    layout = tensor.match.layout(axes=degrees, global_shape=tensor.shape)
    return Layout(known(layout, f"family {own.model.family.name}"))


@lru_cache(maxsize=1 << 12)
def _boxes(layout: Layout, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Boxes of a tensor that ranks hold under a layout."""
    placed = (own for coords in layout.ranks() for own in place(layout, shape, coords=coords))
    return tuple(dict.fromkeys(own.box for own in placed if own.replica == 0 and own.box.numel))


def _common(own: TargetRun) -> dict[str, object]:
    """What all ranks have in common."""
    content: dict[str, object] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if own.distributed and own.chain:
        content = {"distrib_optim_sharding_type": _SHARDING, **content}
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    every = [_optimizer(own, groups) for groups in own.chain]
    optimizer = {"optimizer": every[0] if len(every) == 1 else dict(enumerate(every))} if every else {}
    return {"args": namespace(own.arguments), **own.common, **optimizer, "content_metadata": content}


def _optimizer(own: TargetRun, groups: tuple[OptimizerGroup, ...]) -> dict[str, object]:
    """One optimizer without its tensors. Its groups name no parameters: Megatron takes those of the run."""
    if own.distributed:
        entries = [group.entry() for group in groups]
        return {"optimizer": {"param_groups": entries}, "param_state_sharding_type": _SHARDING, **own.scaler}
    step = next((group.step for group in groups if group.step is not None), None)
    state = {} if step is None else {"common_step": step}
    entries = [dict(group.hyper) for group in groups]
    return {"optimizer": {"state": state, "param_groups": entries}, **own.scaler}
