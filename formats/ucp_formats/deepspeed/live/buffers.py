"""The tensors that DeepSpeed's optimizers step on a rank, and which elements of which parameters they hold.

With stages 1 and 2 and BF16_Optimizer, a rank holds a share of one buffer per group; with FP16_Optimizer, the full
buffer; with stage 3, one tensor per sub-group, with a chunk of each parameter. Without ZeRO there can be a tensor per
parameter. The master of a parameter is a range of such a tensor; its moments are the same range of tensors of the same
shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ucp.contract.layouts import Chunks, FlatBuffer, FlatLayout, Span, WholeParameters, chunk_axis
from ucp.core.layout import AxisLayout, Layout
from ucp.live.parts import FlatRange, LivePart
from ucp_formats.deepspeed.placement import PLACEMENT
from ucp_formats.deepspeed.read.stacks import LAYERS, ExpertStacks

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

MOMENTUM = "momentum_buffer"
"""State of Muon. Under stages 1 and 2, each rank whose share has elements of a parameter holds this state in full."""

_NOTHING = Span(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A tensor that the wrapped optimizer steps."""

    group: int
    """Number of its parameter group."""
    tensor: torch.Tensor
    """The masters in it."""
    params: Mapping[nn.Parameter, FlatRange]
    """Parameters of the group in the order of the buffer, each with its elements on this rank (possibly none)."""
    separate: Mapping[str, Mapping[nn.Parameter, FlatRange]] = field(default_factory=dict)
    """States with another layout than the masters, each with the elements of every parameter."""


def list_zero_buffers(optimizer: Any) -> Iterator[Buffer]:
    """Buffers of stages 1 and 2; the order of the parameters and their offsets are right under round robin too."""
    layout = zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
    for group, (params, starts) in enumerate(layout):
        tensor = optimizer.single_partition_of_fp32_groups[group]
        process_group = optimizer.real_dp_process_group[group]
        shares = _locate_shares(params, starts, tensor, process_group)
        separate = {}
        if optimizer.optimizer.param_groups[group].get("use_muon"):
            inside = optimizer.params_in_partition[group]
            separate = {MOMENTUM: _locate_shares(params, starts, tensor, process_group, whole_in=inside)}
        yield Buffer(group=group, tensor=tensor, params=shares, separate=separate)


def list_packed_buffers(
    groups: Sequence[Sequence[nn.Parameter]],
    tensors: Sequence[torch.Tensor],
    process_groups: Sequence[ProcessGroup] | None = None,
) -> Iterator[Buffer]:
    """Buffers of BF16_Optimizer and FP16_Optimizer, in which parameters follow one another in order, without gaps.

    `process_groups`: the ranks that each group is partitioned over; None if every rank holds all (FP16_Optimizer).
    """
    for group, (params, tensor) in enumerate(zip(groups, tensors, strict=True)):
        ranks = None if process_groups is None else process_groups[group]
        yield Buffer(group=group, tensor=tensor, params=_locate_shares(params, _pack_starts(params), tensor, ranks))


def list_stage3_buffers(optimizer: Any) -> Iterator[Buffer]:
    """Buffers of the sub-groups of stage 3."""
    for number, (params, tensor) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        shares: dict[nn.Parameter, FlatRange] = {}
        at = 0
        for param in params:
            shares[param] = replace(locate_chunk(param, optimizer.sub_group_process_groups[number]), start=at)
            at += param.partition_numel()
        yield Buffer(group=optimizer.sub_group_to_group_id[number], tensor=tensor, params=shares)


def list_single_buffers(groups: Iterable[Iterable[tuple[nn.Parameter, torch.Tensor]]]) -> Iterator[Buffer]:
    """A buffer per parameter; `groups`: the parameters of each group, each with the tensor that the optimizer steps."""
    for group, members in enumerate(groups):
        for param, tensor in members:
            share = FlatRange(start=0, numel=tensor.numel(), part=make_full_part(param))
            yield Buffer(group=group, tensor=tensor, params={param: share})


def make_full_part(param: Any) -> LivePart:
    """The part of a rank that holds the full parameter, or its experts of one that AutoEP stacks."""
    shape = tuple(getattr(param, "ds_shape", param.shape))
    record = getattr(param, "ds_autoep_uc_meta", None)  # set in auto_ep_layer.py, 0.19.8
    if record is None:
        return LivePart.full(shape)
    placement, global_shape = record[PLACEMENT], tuple(record["logical_shape"])
    counts = {"num_experts": global_shape[0], "ep_size": placement["ep_size"]}
    layer = {"expert_key_prefix": "experts", **counts, PLACEMENT: placement}
    axis = ExpertStacks.of({LAYERS: [layer]}, "the engine").axis("experts.w1")
    coords = {axis.axis: record["ep_rank"]}
    return LivePart(local_shape=shape, layout=Layout((axis,)), coords=coords, global_shape=global_shape)


def locate_chunk(param: Any, process_group: ProcessGroup) -> FlatRange:
    """The elements that `ds_tensor` of a parameter holds on this rank, without padding."""
    rank, ranks = _group_position(process_group)
    span = Chunks({"": param.ds_numel}, ranks).spans(rank).get("", _NOTHING)
    return FlatRange(start=0, numel=span.numel, part=_cut_part(make_full_part(param), chunk_axis(ranks), rank))


def _locate_shares(
    params: Sequence[nn.Parameter],
    starts: Sequence[int],
    tensor: torch.Tensor,
    process_group: ProcessGroup | None,
    *,
    whole_in: Sequence[nn.Parameter] | None = None,
) -> dict[nn.Parameter, FlatRange]:
    """The elements of each parameter in this rank's share of a buffer; without a process group, in the full buffer.

    `starts`: element of the buffer where each parameter starts. `whole_in`: for a state in a separate tensor that holds
    every parameter of the share in full, the parameters in the order of that tensor.
    """
    rank, ranks = (0, 1) if process_group is None else _group_position(process_group)
    numels = {str(at): param.numel() for at, param in enumerate(params)}
    buffer = FlatBuffer.pack(numels, ranks=ranks, share=tensor.numel(), starts=starts, known_from="the live optimizer")
    layout: FlatLayout = buffer if whole_in is None else WholeParameters(buffer)
    axes, spans = layout.axes(), layout.spans(rank)
    packed = dict(zip(whole_in or (), _pack_starts(whole_in or ()), strict=True))
    shares = {}
    for at, param in enumerate(params):
        start, numel = spans.get(str(at), _NOTHING)
        part = make_full_part(param)
        if str(at) in axes:
            part = _cut_part(part, axes[str(at)], rank)
        shares[param] = FlatRange(start=packed.get(param, start), numel=numel, part=part)
    return shares


def _pack_starts(params: Sequence[nn.Parameter]) -> list[int]:
    return list(accumulate((param.numel() for param in params), initial=0))[:-1]


def _cut_part(part: LivePart, axis: AxisLayout, rank: int) -> LivePart:
    """The part that rank `rank` holds after `axis` has split `part` in row-major order."""
    layout = Layout(axes=part.layout.axes, flat=(axis,))
    return replace(part, layout=layout, coords={**part.coords, axis.axis: rank})


def _group_position(process_group: ProcessGroup) -> tuple[int, int]:
    from torch import distributed

    return distributed.get_rank(process_group), distributed.get_world_size(process_group)
