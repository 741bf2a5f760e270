"""The optimizers of a rank of megatron-core, as what they keep of each parameter.

| optimizer | steps | keeps the weight |
|---|---|---|
| FP32Optimizer | the parameters | no: it is the model's |
| Float16OptimizerWithFloat16Params | fp32 masters of 16-bit parameters | in the masters |
| DistributedOptimizer | this rank's range of each, flattened, as buckets are dealt out | in masters of the ranges |
| ChainedOptimizer | what its optimizers step: dense parameters, experts | as they do |

A state is put where the inner optimizer of torch, Apex or Transformer Engine has it. Steps that it counts for a whole
group (Apex, Transformer Engine) are set there.
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
from ucp.errors import LoadError, UnsupportedError, listed
from ucp.live.adapters import LiveModel
from ucp.live.match.groups import LiveGroup
from ucp.live.model.module import dtype_of
from ucp.live.optimizer.torch_optimizer import TorchOptimizer
from ucp.live.parts import LiveParam, LivePart
from ucp.live.run.ranks import Ranks, run_together

if TYPE_CHECKING:
    import torch

_KNOWN = ("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One optimizer of megatron-core."""

    outer: Any
    """The MegatronOptimizer."""
    inner: TorchOptimizer
    """The one it steps with, by the names of the parameters."""
    masters: Mapping[str, torch.Tensor]
    """Parameter to its fp32 master, or this rank's range of it."""
    copied: frozenset[str]
    """Parameters that are made from masters, on this rank or another of its data-parallel group."""
    parts: Mapping[str, LivePart]
    """Parameter to the range of it that this rank steps, where that is not all of the rank's."""
    everyone: tuple[tuple[str, ...], ...]
    """Parameters of each group that any rank of the data-parallel group steps."""

    @property
    def counts_in_groups(self) -> bool:
        """Whether steps are counted for a group, not for every parameter."""
        return not any(base.__module__.startswith("torch.optim.") for base in type(self.inner.handle).__mro__[:-2])

    def params(self, hyper: Sequence[Mapping[str, object]]) -> Iterator[LiveParam]:
        """What it keeps; see `LiveOptimizer`."""
        if self.counts_in_groups and not self.inner.handle.state and self.outer.init_state_fn is not None:
            self.outer.init_state_fn(self.inner.handle, self.outer.config)  # as Megatron does before it loads
        for own in self.inner.params(hyper):
            keeps = dict(own.keeps or {})
            if self.counts_in_groups:
                keeps[STEP] = None
            if own.name in self.masters:
                keeps[WEIGHT] = dtype_of(self.masters[own.name])
            yield replace(own, keeps=keeps, part=self.parts.get(own.name))

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Take what was brought; masters are in place already. Raises LoadError where one group has several steps."""
        held = ((name, states[name].items()) for name in self.inner.live if name in states)
        own = {name: {state: value for state, value in brought if state != WEIGHT} for name, brought in held}
        if self.counts_in_groups:
            steps = {name: brought.pop(STEP).item() for name, brought in own.items() if STEP in brought}
            for names, group in zip(self.everyone, self.inner.handle.param_groups, strict=True):
                counted = {steps[name] for name in names if name in steps}
                if len(counted) > 1:
                    raise LoadError(
                        "expected one number of steps for all parameters of a group, which is all that the optimizer "
                        f"keeps; the checkpoint has {', '.join(map(str, sorted(counted)))}"
                    )
                if counted:
                    group[STEP] = int(counted.pop())
        self.inner.put(own, counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLive:
    """All optimizers of the rank, as one (`LiveOptimizer`)."""

    members: tuple[Member, ...]
    """Those that step something."""

    def groups(self) -> list[LiveGroup]:
        """Groups of all, one optimizer after the other."""
        return [
            replace(group, params=names)
            for own in self.members
            for group, names in zip(own.inner.groups(), own.everyone, strict=True)
        ]

    def params(self, hyper: Sequence[Mapping[str, object]]) -> list[LiveParam]:
        """What they keep of each parameter."""
        return [param for own, given in self._dealt(hyper) for param in own.params(given)]

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """The master itself; other states as the inner optimizer has them, of the range that it steps."""
        own = next(own for own in self.members if name in own.inner.live)
        if state == WEIGHT:
            return own.masters[name]
        held = shape if counts else tuple(own.inner.live[name].shape)
        return own.inner.landing(name, state, dtype, held, counts=counts)

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Give every optimizer its own."""
        for own in self.members:
            own.put(states, counts)

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group."""
        for own, given in self._dealt(hyper):
            own.inner.put_hyper(given)

    def _dealt(self, hyper: Sequence[Mapping[str, object]]) -> Iterator[tuple[Member, Sequence[Mapping[str, object]]]]:
        start = 0
        for own in self.members:
            yield own, hyper[start : start + len(own.everyone)]
            start += len(own.everyone)


def describe_optimizers(optimizer: Any, model: LiveModel, ranks: Ranks) -> MegatronLive:
    """What the optimizers of this rank keep. Collective. Raises UnsupportedError, LoadError."""
    found = run_together(ranks, lambda: [_member(own, model) for own in _members(optimizer)])
    return MegatronLive(members=tuple(replace(own, everyone=_of_all(own)) for own in found))


def _members(optimizer: Any) -> list[Any]:
    """The optimizers that step something. Raises UnsupportedError for kinds that keep states elsewhere."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    kinds = {type(own).__name__ for own in every} | ({type(optimizer).__name__} - {"ChainedOptimizer"})
    odd = [f"a {kind}" for kind in sorted(kinds - {*_KNOWN})]
    for own in every:
        config = own.config
        inner = type(own.optimizer).__name__
        odd += ["use_precision_aware_optimizer: its masters lie in FusedAdam"] * bool(
            getattr(config, "use_precision_aware_optimizer", False)
        )
        odd += ["optimizer_cpu_offload: states lie in copies on the CPU"] * (inner == "HybridDeviceOptimizer")
    if odd:
        raise UnsupportedError(
            f"expected one of megatron-core's {', '.join(_KNOWN)}, or several chained; got\n"
            f"{listed(dict.fromkeys(odd))}\nLoad the model without optimizer=, or convert with --to megatron and load "
            "the result as Megatron does"
        )
    return [own for own in every if not getattr(own, "is_stub_optimizer", False)]


def _member(outer: Any, model: LiveModel) -> Member:
    stepped = {id(param): param for group in outer.optimizer.param_groups for param in group["params"]}
    pairs = list(_pairs(outer))
    stepped |= {id(own): param for param, own in pairs}
    strangers = [list(own.shape) for own in stepped.values() if id(own) not in model.owners]
    if strangers:
        raise LoadError(
            f"expected an optimizer over the parameters of the model; it has others, of shape\n"
            f"{listed(map(str, strangers))}\npass all chunks of the model that the optimizer was made for"
        )
    names = tuple(
        tuple(model.owners[id(stepped[id(param)])] for param in group["params"])
        for group in outer.optimizer.param_groups
    )
    live = dict(zip(chain(*names), (p for g in outer.optimizer.param_groups for p in g["params"]), strict=True))
    is_distributed = hasattr(outer, "gbuf_ranges")
    masters = {model.owners[id(param)]: own for param, own in pairs if own.dtype != param.dtype}
    copied = frozenset(masters)
    if is_distributed:
        low = (param for buffer in outer.buffers for param in buffer.params if param.dtype.itemsize < 4)
        copied = frozenset(model.owners[id(param)] for param in low)
    whole = {own.name: own.part for own in model.tensors}
    parts = {}
    for param, _ in pairs if is_distributed else ():
        name = model.owners[id(param)]
        parts[name] = _range_of(outer, param, whole[name])
    inner = TorchOptimizer(handle=outer.optimizer, names=names, live=live, memory=live, forms={})
    return Member(outer=outer, inner=inner, masters=masters, copied=copied, parts=parts, everyone=names)


def _pairs(outer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of the model, and what is stepped in their place."""
    for theirs, ours in (
        ("float16_groups", "fp32_from_float16_groups"),
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_fp32_groups", "shard_fp32_groups"),
    ):
        for params, stepped in zip(getattr(outer, theirs, ()), getattr(outer, ours, ()), strict=True):
            yield from zip(params, stepped, strict=True)


def _range_of(outer: Any, param: torch.Tensor, whole: LivePart) -> LivePart:
    """The range of a parameter that this rank steps: where it starts in its bucket, and how long shares of that are."""
    buffer, dtype, bucket = outer.model_param_gbuf_map[param]
    told = outer.gbuf_ranges[buffer][dtype][bucket]["param_map"][param]
    parts = outer.data_parallel_group.size()
    share = outer.buffers[buffer].buckets[bucket].grad_data.numel() // parts
    start = told["gbuf_world_in_bucket"].start - told["param"].start
    axis = AxisLayout(
        "dp", parts, pattern("partition", start=start, share=share), "buckets of the distributed optimizer"
    )
    coords = {**whole.coords, "dp": outer.data_parallel_group.rank()}
    layout = Layout(whole.layout.axes, (axis,))
    held = locate_shard(Layout(flat=(axis,)), tuple(param.shape), coords=coords).flat or ()
    if [(own.pair.global_box.offsets[0], own.pair.global_box.stops[0]) for own in held] != [
        (told["param"].start, told["param"].end)
    ]:
        raise UnsupportedError(
            f"expected elements {told['param'].start} to {told['param'].end} of a parameter in the share of this rank, "
            f"as the distributed optimizer says; its bucket leaves {[str(own.pair.global_box) for own in held]}"
        )
    return replace(whole, layout=layout, coords=coords)


def _of_all(own: Member) -> tuple[tuple[str, ...], ...]:
    """Parameters of each group that any rank of the data-parallel group steps. Collective there."""
    from torch import distributed

    if not own.parts and not hasattr(own.outer, "gbuf_ranges"):
        return own.everyone
    group = own.outer.data_parallel_group
    told: list[Any] = [None] * group.size()
    distributed.all_gather_object(told, own.everyone, group=group)
    return tuple(tuple(dict.fromkeys(chain(*names))) for names in zip(*told, strict=True))
