"""The tensors that DeepSpeed's optimizers step on a rank, and which elements of which parameters these hold.

Every wrapper around an optimizer comes down to this: stages 1 and 2 and BF16_Optimizer hold a share of a buffer per
group, FP16_Optimizer the whole of it, stage 3 a chunk of each parameter per sub-group; without ZeRO there may be a
tensor per parameter. The masters of a parameter are a stretch of such a tensor, and its moments the same stretch of
tensors of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from ucp.contract.registry import pattern
from ucp.core.layout import AxisLayout, Layout
from ucp.live.optimizer.flat_optimizer import Stretch
from ucp.live.parts import LivePart
from ucp_formats.deepspeed.live.handles import (
    Bf16Optimizer,
    Fp16Optimizer,
    PartitionedParam,
    Stage3Optimizer,
    ZeroOptimizer,
)
from ucp_formats.deepspeed.read.optimizer.flat_layout import chunk_axis

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

__all__ = [
    "Buffer",
    "bf16_buffers",
    "chunk_of",
    "fp16_buffers",
    "single_buffers",
    "stage3_buffers",
    "zero_buffers",
]

MOMENTUM = "momentum_buffer"
"""State of Muon that stages 1 and 2 keep whole on every rank which has some of a parameter."""

PartOf: TypeAlias = "Callable[[nn.Parameter], LivePart]"
"""What the model parallelism of the run leaves a rank of a parameter, before ZeRO cuts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A tensor that the wrapped optimizer steps."""

    group: int
    """Number of its parameter group."""
    tensor: torch.Tensor
    """Masters."""
    params: Mapping[nn.Parameter, Stretch]
    """Parameters of the group, in the order of the buffer; some may have no elements on this rank."""
    apart: Mapping[str, Mapping[nn.Parameter, Stretch]] = field(default_factory=dict)
    """States that do not lie as the masters do."""


def zero_buffers(optimizer: ZeroOptimizer, part_of: PartOf) -> Iterator[Buffer]:
    """Those of stages 1 and 2; the order and the offsets are those of the buffer, also when it was dealt out."""
    layout = zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
    for group, (params, starts) in enumerate(layout):
        tensor = optimizer.single_partition_of_fp32_groups[group]
        process_group = optimizer.real_dp_process_group[group]
        own = _shares(params, starts, tensor, process_group, part_of)
        whole = {}
        if optimizer.optimizer.param_groups[group].get("use_muon"):
            touched = _shares(params, starts, tensor, process_group, part_of, name="touched")
            whole = {MOMENTUM: _one_by_one(touched, optimizer.params_in_partition[group])}
        yield Buffer(group=group, tensor=tensor, params=own, apart=whole)


def bf16_buffers(optimizer: Bf16Optimizer, part_of: PartOf) -> Iterator[Buffer]:
    """Those of BF16_Optimizer, which neither reorders nor aligns."""
    for group, (params, tensor) in enumerate(
        zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True)
    ):
        own = _shares(params, _packed(params), tensor, optimizer.real_dp_process_group[group], part_of)
        yield Buffer(group=group, tensor=tensor, params=own)


def fp16_buffers(optimizer: Fp16Optimizer, part_of: PartOf) -> Iterator[Buffer]:
    """Those of FP16_Optimizer: every rank holds all."""
    for group, (params, tensor) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        yield Buffer(group=group, tensor=tensor, params=_shares(params, _packed(params), tensor, None, part_of))


def stage3_buffers(optimizer: Stage3Optimizer, part_of: PartOf) -> Iterator[Buffer]:
    """Those of the sub-groups of stage 3."""
    for number, (params, tensor) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        own: dict[nn.Parameter, Stretch] = {}
        at = 0
        for param in params:
            cut: PartitionedParam = param  # type: ignore[assignment]  # what DeepSpeed hangs on it
            own[param] = replace(chunk_of(cut, optimizer.sub_group_process_groups[number], part_of(param)), start=at)
            at += cut.partition_numel()
        yield Buffer(group=optimizer.sub_group_to_group_id[number], tensor=tensor, params=own)


def single_buffers(groups: Iterable[Iterable[tuple[nn.Parameter, torch.Tensor]]], part_of: PartOf) -> Iterator[Buffer]:
    """One per parameter; `groups`: parameters and what is stepped for each."""
    for group, members in enumerate(groups):
        for param, tensor in members:
            own = Stretch(start=0, numel=tensor.numel(), part=part_of(param))
            yield Buffer(group=group, tensor=tensor, params={param: own})


def chunk_of(param: PartitionedParam, process_group: ProcessGroup, part: LivePart) -> Stretch:
    """What `ds_tensor` of a parameter holds, without the padding."""
    rank, ranks = _place(process_group)
    each = param.partition_numel()
    held = max(0, min(each, param.ds_numel - rank * each))
    return Stretch(start=0, numel=held, part=_cut(part, chunk_axis(ranks), rank))


def _shares(
    params: Sequence[nn.Parameter],
    starts: Sequence[int],
    tensor: torch.Tensor,
    process_group: ProcessGroup | None,
    part_of: PartOf,
    *,
    name: str = "partition",
) -> dict[nn.Parameter, Stretch]:
    """An equal share of one buffer; `starts`: element of it where each parameter starts. None: all of it."""
    rank, ranks = (0, 1) if process_group is None else _place(process_group)
    share = tensor.numel()
    found = {}
    for param, start in zip(params, starts, strict=True):
        axis = AxisLayout("dp", ranks, pattern(name, start=start, share=share), "the live optimizer")
        part = _cut(part_of(param), axis, rank)
        held = axis.pattern.regions((param.numel(),), ranks, rank)
        numel = sum(pair.local.numel for pair in held)
        found[param] = Stretch(start=max(0, start - rank * share) if numel else 0, numel=numel, part=part)
    return found


def _one_by_one(touched: Mapping[nn.Parameter, Stretch], order: Sequence[nn.Parameter]) -> dict[nn.Parameter, Stretch]:
    """The same stretches in a tensor of their own, in `order`."""
    starts = dict(zip(order, _packed(order), strict=True))
    return {param: replace(own, start=starts.get(param, 0)) for param, own in touched.items()}


def _packed(params: Sequence[nn.Parameter]) -> list[int]:
    return list(accumulate((param.numel() for param in params), initial=0))[:-1]


def _cut(part: LivePart, axis: AxisLayout, rank: int) -> LivePart:
    """What is left of a part when its row-major order is cut."""
    layout = Layout(axes=part.layout.axes, flat=(axis,))
    return replace(part, layout=layout, coords={**part.coords, axis.axis: rank})


def _place(process_group: ProcessGroup) -> tuple[int, int]:
    from torch import distributed

    return distributed.get_rank(process_group), distributed.get_world_size(process_group)
