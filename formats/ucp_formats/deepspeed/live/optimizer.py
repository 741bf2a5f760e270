"""The optimizer of an engine as the core sees it: states of single parameters, kept in flat tensors for many."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucp.core.names import STEP
from ucp.live.adapters import State
from ucp.live.match.groups import LiveGroup
from ucp.live.optimizer.flat_optimizer import FlatOptimizer, Slot
from ucp.live.optimizer.torch_optimizer import TorchOptimizer
from ucp_formats.deepspeed.live.buffers import MOMENTUM, Buffer

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["BufferedOptimizer", "described"]

_ADAM = ("exp_avg", "exp_avg_sq")
_KEPT = {
    "FusedAdam": _ADAM,
    "DeepSpeedCPUAdam": _ADAM,
    "FusedLamb": _ADAM,
    "MuonWithAuxAdam": _ADAM,
    "FusedLion": ("exp_avg",),
    "DeepSpeedCPULion": _ADAM,
    "DeepSpeedCPUAdagrad": ("exp_avg_sq",),
}
"""Optimizer of DeepSpeed's own (ops/) to the states it makes in its first step, beside a step that is a number."""
_CURE = "load into an engine of ZeRO 0 in fp32, or without states (optimizer=False)"
_COUNT_IN_GROUP = ("FusedAdam", "FusedLion")
"""Those that put a step into every group too, 0 for good."""


def described(optimizer: Optimizer, buffers: Sequence[Buffer], names: Mapping[nn.Parameter, str]) -> BufferedOptimizer:
    """The wrapped optimizer, and what it steps. `names`: parameter to its name in the whole model."""
    tensors = {str(number): buffer.tensor for number, buffer in enumerate(buffers)}
    held = list(zip(tensors, buffers, strict=True))
    groups = range(len(optimizer.param_groups))
    members = tuple(tuple(key for key, own in held if own.group == n) for n in groups)
    forms: dict[str, Mapping[str, State]] = {
        key: kept for key, own in held if (kept := _kept(optimizer, optimizer.param_groups[own.group], own.tensor))
    }
    base = TorchOptimizer(handle=optimizer, names=members, live=tensors, memory=tensors, forms=forms)
    slots = {
        names[param]: Slot(key=key, usual=usual, apart={state: of[param] for state, of in own.apart.items()})
        for key, own in held
        for param, usual in own.params.items()
    }
    shapes = {
        (key, state): (sum(stretch.numel for stretch in of.values()),)
        for key, own in held
        for state, of in own.apart.items()
    }
    return BufferedOptimizer(base=base, slots=slots, cure=_CURE, shapes=shapes, buffers=dict(held))


def _kept(optimizer: Optimizer, group: Mapping[str, object], tensor: torch.Tensor) -> dict[str, State]:
    """Form of what an optimizer of DeepSpeed's own keeps of a tensor; nothing for others."""
    if group.get("use_muon"):
        return {MOMENTUM: tensor.detach()}
    kind = _stepper(optimizer, group)
    is_float = "CPU" in kind and getattr(optimizer, "fp32_optimizer_states", False)
    like = tensor.detach()[:0].float() if is_float else tensor.detach()
    moments = dict.fromkeys(_KEPT.get(kind, ()), like)
    return {STEP: 0, **moments} if moments else {}


def _stepper(optimizer: Optimizer, group: Mapping[str, object]) -> str:
    """Class that steps a group: Muon has another optimizer for what are no matrices, or does it itself."""
    other = None if group.get("use_muon") else getattr(optimizer, "aux_optimizer", None)
    return type(optimizer if other is None else other).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedOptimizer(FlatOptimizer):
    """An optimizer whose parameters are buffers."""

    buffers: Mapping[str, Buffer]
    """Key to the buffer."""

    def groups(self) -> list[LiveGroup]:
        """Its groups with their hyper-parameters."""
        stepping = [_stepper(self.base.handle, group) for group in self.base.handle.param_groups]
        return [
            replace(own, hyper={STEP: 0, **own.hyper}) if kind in _COUNT_IN_GROUP else own
            for own, kind in zip(FlatOptimizer.groups(self), stepping, strict=True)
        ]

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Take what was brought, and let DeepSpeed's `safe_get_full_optimizer_state` find it before the next step."""
        FlatOptimizer.put(self, states, counts)
        utils = importlib.import_module("deepspeed.utils")
        for own in self.buffers.values():
            params = [param for param in own.params if hasattr(param, "_hp_mapping")]
            if self.base.handle.state.get(own.tensor) and params:
                utils.lazy_init_hp_params_optimizer_state(params, own.tensor, self.base.handle.state)
