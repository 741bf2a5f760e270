"""The live optimizers of a megatron-core rank: the states, masters and ranges they keep of each parameter.

| optimizer | steps | keeps the weight |
|---|---|---|
| FP32Optimizer | the parameters | no: the model has it |
| Float16OptimizerWithFloat16Params | fp32 masters of 16-bit parameters | in the masters |
| DistributedOptimizer | this rank's range of each flattened parameter | in masters of the ranges |
| ChainedOptimizer | the parameters of its optimizers: dense parameters, experts | as they do |

States are loaded into the inner optimizer of torch, Apex or Transformer Engine. Apex and Transformer Engine count steps
per group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ucp.contract.plugins import pattern
from ucp.core.index import STEP, WEIGHT
from ucp.core.layout import AxisLayout, Layout, locate_shard
from ucp.core.tensor import DType
from ucp.errors import LoadError, UnsupportedError, format_list
from ucp.live.adapters import LiveModel
from ucp.live.match.groups import LiveGroup
from ucp.live.model.module import dtype_of
from ucp.live.optimizer.torch_optimizer import TorchOptimizer
from ucp.live.parts import LiveParam, LivePart
from ucp.live.run.ranks import Ranks, run_together

if TYPE_CHECKING:
    import torch

_SUPPORTED = ("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainMember:
    """One optimizer of megatron-core."""

    outer: Any
    """The MegatronOptimizer."""
    inner: TorchOptimizer
    """The inner optimizer that it steps with; parameters have their canonical names."""
    masters: Mapping[str, torch.Tensor]
    """Parameter to its fp32 master, or this rank's range of it."""
    copied: frozenset[str]
    """Parameters that are copied from masters, on this rank or on another one of its data-parallel group."""
    parts: Mapping[str, LivePart]
    """Parameter to the range of it that this rank steps, if the optimizer is distributed."""
    group_params: tuple[tuple[str, ...], ...]
    """Parameters of each group that any rank of the data-parallel group steps."""

    @property
    def is_distributed(self) -> bool:
        """Whether it is a DistributedOptimizer."""
        return hasattr(self.outer, "gbuf_ranges")

    @property
    def counts_in_groups(self) -> bool:
        """Whether steps are counted per group, not per parameter."""
        return not any(base.__module__.startswith("torch.optim.") for base in type(self.inner.handle).__mro__[:-2])

    def params(self, hyper: Sequence[Mapping[str, object]]) -> Iterator[LiveParam]:
        """Its parameters; see `LiveOptimizer`."""
        if self.counts_in_groups and not self.inner.handle.state and self.outer.init_state_fn is not None:
            self.outer.init_state_fn(self.inner.handle, self.outer.config)  # as Megatron does before it loads
        for param in self.inner.params(hyper):
            keeps = dict(param.keeps or {})
            if self.counts_in_groups:
                keeps[STEP] = None
            if param.name in self.masters:
                keeps[WEIGHT] = dtype_of(self.masters[param.name])
            yield replace(param, keeps=keeps, part=self.parts.get(param.name))

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Load states except masters, which are loaded already. Raises LoadError if steps differ within a group."""
        loaded = {
            name: {state: value for state, value in states[name].items() if state != WEIGHT}
            for name in self.inner.live
            if name in states
        }
        if self.counts_in_groups:
            steps = {name: values.pop(STEP).item() for name, values in loaded.items() if STEP in values}
            for names, group in zip(self.group_params, self.inner.handle.param_groups, strict=True):
                group_steps = {steps[name] for name in names if name in steps}
                if len(group_steps) > 1:
                    raise LoadError(
                        "expected the same step for all parameters of a group, because the optimizer counts steps per "
                        f"group; the checkpoint has {', '.join(map(str, sorted(group_steps)))}"
                    )
                if group_steps:
                    group[STEP] = int(group_steps.pop())
        self.inner.put(loaded, counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLive:
    """All optimizers of the rank, as one `LiveOptimizer`."""

    members: tuple[ChainMember, ...]
    """The optimizers that step parameters."""

    def groups(self) -> list[LiveGroup]:
        """Groups of all members, in order."""
        return [
            replace(group, params=names)
            for member in self.members
            for group, names in zip(member.inner.groups(), member.group_params, strict=True)
        ]

    def params(self, hyper: Sequence[Mapping[str, object]]) -> list[LiveParam]:
        """Parameters of all members."""
        return [param for member, member_hyper in self._split(hyper) for param in member.params(member_hyper)]

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """Memory to load into: for the weight, the master; for other states, memory of the inner optimizer."""
        member = next(member for member in self.members if name in member.inner.live)
        if state == WEIGHT:
            return member.masters[name]
        local_shape = shape if counts else tuple(member.inner.live[name].shape)
        return member.inner.landing(name, state, dtype, local_shape, counts=counts)

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Load the states of every member."""
        for member in self.members:
            member.put(states, counts)

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set the hyper-parameters of every group."""
        for member, member_hyper in self._split(hyper):
            member.inner.put_hyper(member_hyper)

    def _split(
        self, hyper: Sequence[Mapping[str, object]]
    ) -> Iterator[tuple[ChainMember, Sequence[Mapping[str, object]]]]:
        """Hyper-parameters by member."""
        start = 0
        for member in self.members:
            yield member, hyper[start : start + len(member.group_params)]
            start += len(member.group_params)


def describe_optimizers(optimizer: Any, model: LiveModel, ranks: Ranks) -> MegatronLive:
    """The optimizers of this rank. Collective. Raises UnsupportedError, LoadError."""
    members = run_together(ranks, lambda: [_describe_member(outer, model) for outer in _chain_members(optimizer)])
    return MegatronLive(members=tuple(replace(member, group_params=_share_params(member)) for member in members))


def _chain_members(optimizer: Any) -> list[Any]:
    """The optimizers that step parameters. Raises UnsupportedError for kinds that keep states elsewhere."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    kinds = {type(outer).__name__ for outer in chained} | ({type(optimizer).__name__} - {"ChainedOptimizer"})
    unsupported = [f"a {kind}" for kind in sorted(kinds - {*_SUPPORTED})]
    for outer in chained:
        if getattr(outer.config, "use_precision_aware_optimizer", False):
            unsupported.append("use_precision_aware_optimizer: FusedAdam keeps its masters")
        if type(outer.optimizer).__name__ == "HybridDeviceOptimizer":
            unsupported.append("optimizer_cpu_offload: copies on the CPU keep the states")
    if unsupported:
        raise UnsupportedError(
            f"expected one of megatron-core's {', '.join(_SUPPORTED)}, or several chained; got\n"
            f"{format_list(dict.fromkeys(unsupported))}\nLoad the model without optimizer=, or convert with --to "
            "megatron and load the result with Megatron"
        )
    return [outer for outer in chained if not getattr(outer, "is_stub_optimizer", False)]


def _describe_member(outer: Any, model: LiveModel) -> ChainMember:
    groups = [list(group["params"]) for group in outer.optimizer.param_groups]
    replaced = list(_replaced_params(outer))
    model_params = {id(param): param for param in chain(*groups)} | {id(main): param for param, main in replaced}
    unknown = [list(param.shape) for param in model_params.values() if id(param) not in model.owners]
    if unknown:
        raise LoadError(
            "expected an optimizer over the parameters of the model; it has parameters that the model lacks, of shape\n"
            f"{format_list(map(str, unknown))}\npass all chunks of the model that the optimizer was made for"
        )
    names = tuple(tuple(model.owners[id(model_params[id(param)])] for param in group) for group in groups)
    live = dict(zip(chain(*names), chain(*groups), strict=True))
    masters = {model.owners[id(param)]: main for param, main in replaced if main.dtype != param.dtype}
    copied = frozenset(masters)
    parts = {}
    if hasattr(outer, "gbuf_ranges"):
        low_precision = (param for buffer in outer.buffers for param in buffer.params if param.dtype.itemsize < 4)
        copied = frozenset(model.owners[id(param)] for param in low_precision)
        part_of_name = {tensor.name: tensor.part for tensor in model.tensors}
        for param, _ in replaced:
            name = model.owners[id(param)]
            parts[name] = _stepped_range(outer, param, part_of_name[name])
    inner = TorchOptimizer(handle=outer.optimizer, names=names, live=live, memory=live, forms={})
    return ChainMember(outer=outer, inner=inner, masters=masters, copied=copied, parts=parts, group_params=names)


def _replaced_params(outer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of the model, and the tensors that are stepped in their place."""
    for model_groups, main_groups in (
        ("float16_groups", "fp32_from_float16_groups"),
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_fp32_groups", "shard_fp32_groups"),
    ):
        for params, mains in zip(getattr(outer, model_groups, ()), getattr(outer, main_groups, ()), strict=True):
            yield from zip(params, mains, strict=True)


def _stepped_range(outer: Any, param: torch.Tensor, part: LivePart) -> LivePart:
    """The range of a parameter that this rank steps, from where its bucket starts and how the ranks share the bucket.

    `part`: the part of the parameter that this rank's model holds.
    """
    buffer, dtype, bucket = outer.model_param_gbuf_map[param]
    ranges = outer.gbuf_ranges[buffer][dtype][bucket]["param_map"][param]
    low, high = ranges["param"].start, ranges["param"].end
    ranks = outer.data_parallel_group.size()
    share = outer.buffers[buffer].buckets[bucket].grad_data.numel() // ranks
    start = ranges["gbuf_world_in_bucket"].start - low
    partition = pattern("partition", start=start, share=share)
    axis = AxisLayout("dp", ranks, partition, "buckets of the distributed optimizer")
    coords = {**part.coords, "dp": outer.data_parallel_group.rank()}
    runs = locate_shard(Layout(flat=(axis,)), tuple(param.shape), coords=coords).flat or ()
    boxes = [run.pair.global_box for run in runs]
    if [(box.offsets[0], box.stops[0]) for box in boxes] != [(low, high)]:
        raise UnsupportedError(
            f"expected elements {low} to {high} of a parameter in the share of this rank, as the distributed "
            f"optimizer says; its bucket gives {[str(box) for box in boxes]}"
        )
    return replace(part, layout=Layout(part.layout.axes, (axis,)), coords=coords)


def _share_params(member: ChainMember) -> tuple[tuple[str, ...], ...]:
    """Parameters of each group that any rank of the data-parallel group steps. Collective in that group."""
    from torch import distributed

    if not member.is_distributed:
        return member.group_params
    group = member.outer.data_parallel_group
    gathered: list[Any] = [None] * group.size()
    distributed.all_gather_object(gathered, member.group_params, group=group)
    return tuple(tuple(dict.fromkeys(chain(*names))) for names in zip(*gathered, strict=True))
