"""The optimizer classes of an engine: where each keeps masters, what it steps, how it computes weights from masters."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ucp.core.index import STEP
from ucp.errors import UnsupportedError
from ucp.live.adapters import LiveOptimizer, State
from ucp.live.match.groups import LiveGroup
from ucp.live.optimizer.flat_optimizer import FlatOptimizer, Slot
from ucp.live.optimizer.torch_optimizer import TorchOptimizer
from ucp.live.parts import LivePart
from ucp_formats.deepspeed.experts import ExpertNumbers, global_name, is_expert
from ucp_formats.deepspeed.live.buffers import (
    MOMENTUM,
    Buffer,
    list_packed_buffers,
    list_single_buffers,
    list_stage3_buffers,
    list_zero_buffers,
)
from ucp_formats.deepspeed.read.optimizer.saved import is_named_for_experts

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModule:
    """Parameters and persistent buffers of a module with their names."""

    tensors: Mapping[torch.Tensor, tuple[str, ...]]
    """Parameter or buffer to its names; a tied one has several."""
    notes: tuple[str, ...]
    """Notes to the user on state of the module that is not loaded."""

    def name(self, param: torch.Tensor) -> str:
        """The first name of a parameter or buffer."""
        return self.tensors[param][0]


def name_module(module: nn.Module, expert_groups: Mapping[str, ProcessGroup]) -> NamedModule:
    """The tensors of a module: parameters first, in registration order.

    `expert_groups`: DeepSpeed's name for a group of experts to the ranks that share the experts of a layer.
    """
    from torch import distributed

    state = module.state_dict(keep_vars=True)
    named: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
    named += [(name, buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if name in state]
    counts = ExpertNumbers.of(name for name, _ in named).counts
    names: dict[torch.Tensor, list[str]] = {}
    tensor: Any  # with the attributes that DeepSpeed adds
    for local_name, tensor in named:
        name = local_name
        if is_expert(name):  # each rank numbers its experts from 0; a checkpoint numbers those of all ranks
            local = next(count for start, count in counts.items() if name.startswith(start))
            rank = distributed.get_rank(expert_groups[tensor.group_name])
            name = global_name(name, rank=rank, experts_per_rank=local)
        names.setdefault(tensor, []).append(name)
    extra_states = [name for name in state if name.endswith("_extra_state")]
    notes = (f"restore yourself what modules keep beside tensors: {', '.join(extra_states)}",) if extra_states else ()
    return NamedModule(tensors={tensor: tuple(aliases) for tensor, aliases in names.items()}, notes=notes)


_ADAM = ("exp_avg", "exp_avg_sq")
_STATES = {
    "FusedAdam": _ADAM,
    "DeepSpeedCPUAdam": _ADAM,
    "FusedLamb": _ADAM,
    "MuonWithAuxAdam": _ADAM,
    "FusedLion": ("exp_avg",),
    "DeepSpeedCPULion": _ADAM,
    "DeepSpeedCPUAdagrad": ("exp_avg_sq",),
}
"""DeepSpeed's optimizers (ops/) to the states that their first step creates, in addition to `step`, a number."""
_CURE = "load into an engine of ZeRO 0 in fp32, or without states (optimizer=False)"
_COUNT_IN_GROUP = ("FusedAdam", "FusedLion")
"""Optimizers that also put a `step` into every parameter group; it stays 0."""


def describe_optimizer(
    optimizer: Optimizer, buffers: Sequence[Buffer], names: Mapping[nn.Parameter, str]
) -> BufferedOptimizer:
    """The optimizer inside DeepSpeed's class, and the tensors that it steps; `names`: parameter to its global name."""
    tensors = {str(number): buffer.tensor for number, buffer in enumerate(buffers)}
    keyed_buffers = list(zip(tensors, buffers, strict=True))
    groups = range(len(optimizer.param_groups))
    members = tuple(tuple(key for key, buffer in keyed_buffers if buffer.group == n) for n in groups)
    forms: dict[str, Mapping[str, State]] = {}
    for key, buffer in keyed_buffers:
        group, like = optimizer.param_groups[buffer.group], buffer.tensor.detach()
        kind = _stepping_class(optimizer, group)
        if group.get("use_muon"):
            forms[key] = {MOMENTUM: like}
        elif kind in _STATES:
            is_float = "CPU" in kind and getattr(optimizer, "fp32_optimizer_states", False)
            forms[key] = {STEP: 0, **dict.fromkeys(_STATES[kind], like[:0].float() if is_float else like)}
    base = TorchOptimizer(handle=optimizer, names=members, live=tensors, memory=tensors, forms=forms)
    slots = {
        names[param]: Slot(
            key=key, flat_range=share, ranges_by_state={state: of[param] for state, of in buffer.separate.items()}
        )
        for key, buffer in keyed_buffers
        for param, share in buffer.params.items()
    }
    shapes = {
        (key, state): (sum(share.numel for share in of.values()),)
        for key, buffer in keyed_buffers
        for state, of in buffer.separate.items()
    }
    return BufferedOptimizer(base=base, slots=slots, remedy=_CURE, shapes=shapes, buffers=dict(keyed_buffers))


def _stepping_class(optimizer: Optimizer, group: Mapping[str, object]) -> str:
    """Name of the class that steps a group: Muon steps only matrices, and can have another optimizer for the rest."""
    other = None if group.get("use_muon") else getattr(optimizer, "aux_optimizer", None)
    return type(optimizer if other is None else other).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedOptimizer(FlatOptimizer):
    """An optimizer that steps buffers instead of the module's parameters."""

    buffers: Mapping[str, Buffer]
    """Key of a buffer, as in the wrapped optimizer, to the buffer."""

    def groups(self) -> list[LiveGroup]:
        """The parameter groups with their hyper-parameters."""
        groups = []
        for group, handle in zip(FlatOptimizer.groups(self), self.base.handle.param_groups, strict=True):
            hyper = dict(group.hyper)
            if _stepping_class(self.base.handle, handle) in _COUNT_IN_GROUP:
                hyper = {STEP: 0, **hyper}
            if is_named_for_experts(hyper):
                del hyper["name"]
            groups.append(replace(group, hyper=hyper))
        return groups

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Store the states, so that DeepSpeed's `safe_get_full_optimizer_state` also sees them before the next step."""
        FlatOptimizer.put(self, states, counts)
        utils = importlib.import_module("deepspeed.utils")
        for buffer in self.buffers.values():
            params = [param for param in buffer.params if hasattr(param, "_hp_mapping")]
            if self.base.handle.state.get(buffer.tensor) and params:
                utils.lazy_init_hp_params_optimizer_state(params, buffer.tensor, self.base.handle.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """The tensor that the weight of a parameter is loaded into."""

    memory: torch.Tensor
    """Its elements: a range of a flat tensor, or a tensor of the local shape."""
    part: LivePart
    """The part of the parameter that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """The optimizer of an engine, without DeepSpeed's class around it."""

    masters: Mapping[torch.Tensor, Master] = field(default_factory=dict)
    """Parameter of the module to its master, if it has one."""
    optimizer: LiveOptimizer | None = None
    """The optimizer that steps the masters."""
    finish: Callable[[], None] = field(default=lambda: None)
    """Computes the weights from the masters. A collective call."""


_KINDS = frozenset(
    {
        "DeepSpeedZeroOptimizer",
        "BF16_Optimizer",
        "FP16_Optimizer",
        "FP16_UnfusedOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
        "DeepSpeedZeRoOffload",
    }
)
"""Supported classes of deepspeed.runtime."""


def unwrap_optimizer(optimizer: Any, named: NamedModule) -> Wrapped:
    """The masters and the optimizer that steps them. Raises UnsupportedError for a class not in `_KINDS`."""
    from torch.optim import Optimizer

    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("deepspeed.runtime.")]
    inner: Any = getattr(optimizer, "optimizer", None)
    match next((kind for kind in kinds if kind in _KINDS), None):
        case "DeepSpeedZeroOptimizer":
            return _wrap_buffers(inner, list_zero_buffers(optimizer), named, finish=optimizer.update_lp_params)
        case "BF16_Optimizer":
            return _wrap_buffers(
                inner,
                list_packed_buffers(
                    optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, optimizer.real_dp_process_group
                ),
                named,
                finish=optimizer.update_lp_params,
            )
        case "FP16_Optimizer":
            return _copy_weights(
                _wrap_buffers(inner, list_packed_buffers(optimizer.fp16_groups, optimizer.fp32_groups_flat), named)
            )
        case "FP16_UnfusedOptimizer":
            pairs = map(zip, optimizer.fp16_groups, optimizer.fp32_groups)
            return _copy_weights(_wrap_buffers(inner, list_single_buffers(pairs), named))
        case "DeepSpeedZeroOptimizer_Stage3":
            return _wrap_buffers(
                inner, list_stage3_buffers(optimizer), named, finish=partial(_update_chunks, optimizer)
            )
        case "DeepSpeedZeRoOffload":  # stage 3 without an optimizer, for inference
            return Wrapped(finish=partial(_update_chunks, optimizer))
    if isinstance(optimizer, Optimizer) and not type(optimizer).__module__.startswith("deepspeed.runtime.fp16.onebit"):
        members = [[(param, param) for param in group["params"]] for group in optimizer.param_groups]
        return _wrap_buffers(optimizer, list_single_buffers(members), named)
    if optimizer is None:
        return Wrapped()
    raise UnsupportedError(
        f"expected an engine with ZeRO 0 to 3; its optimizer is a {type(optimizer).__name__}, which ucp does not know. "
        "Write files that engine.load_checkpoint reads instead: ucp convert SRC DST --to deepspeed"
    )


def _wrap_buffers(
    optimizer: Optimizer, buffers: Iterable[Buffer], named: NamedModule, *, finish: Callable[[], None] = lambda: None
) -> Wrapped:
    buffer_list = tuple(buffers)
    masters: dict[torch.Tensor, Master] = {
        param: Master(memory=share.narrow(buffer.tensor.detach()), part=share.part)
        for buffer in buffer_list
        for param, share in buffer.params.items()
    }
    names = {param: named.name(param) for buffer in buffer_list for param in buffer.params}
    return Wrapped(masters=masters, optimizer=describe_optimizer(optimizer, buffer_list, names), finish=finish)


def _copy_weights(wrapped: Wrapped) -> Wrapped:
    """The same optimizer with another `finish`: it copies the full masters to the weights."""

    def copy() -> None:
        for param, master in wrapped.masters.items():
            param.data.copy_(master.memory.view(param.shape))

    return Wrapped(masters=wrapped.masters, optimizer=wrapped.optimizer, finish=copy)


def _update_chunks(optimizer: Any) -> None:
    """Copy the masters' chunks, if any, to the weights' chunks; then gather the parameters that stay unsharded."""
    optimizer.checkpoint_event_prologue()
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", ())
    for weights, master in zip(getattr(optimizer, "fp16_partitioned_groups_flat", ()), masters, strict=True):
        weights.data.copy_(master.data)
    optimizer.checkpoint_event_epilogue()
