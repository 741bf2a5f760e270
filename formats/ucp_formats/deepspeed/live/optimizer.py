"""The optimizer of an engine as the core sees it: states of single parameters, kept in flat tensors for many."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucp.core.dtypes import DType
from ucp.core.names import STEP
from ucp.live.adapters import State
from ucp.live.match.groups import LiveGroup
from ucp.live.optimizer.counts import agreed_counts
from ucp.live.optimizer.torch_optimizer import TorchOptimizer
from ucp.live.parts import LiveParam
from ucp_formats.deepspeed.live.buffers import MOMENTUM, Buffer, Stretch

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
    groups = range(len(optimizer.param_groups))
    members = tuple(tuple(key for key, own in zip(tensors, buffers, strict=True) if own.group == n) for n in groups)
    forms: dict[str, Mapping[str, State]] = {
        key: kept
        for key, own in zip(tensors, buffers, strict=True)
        if (kept := _kept(optimizer, optimizer.param_groups[own.group], own.tensor))
    }
    base = TorchOptimizer(handle=optimizer, names=members, live=tensors, memory=tensors, forms=forms)
    slots = {
        names[param]: _Slot(key=key, buffer=own, param=param)
        for key, own in zip(tensors, buffers, strict=True)
        for param in own.params
    }
    return BufferedOptimizer(base=base, slots=slots)


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
class _Slot:
    """A parameter in a buffer."""

    key: str
    """What the wrapped optimizer knows the buffer as."""
    buffer: Buffer
    """The buffer."""
    param: nn.Parameter
    """The parameter."""

    def stretch(self, state: str) -> Stretch:
        """Where a state of it lies."""
        return self.buffer.stretch(self.param, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedOptimizer:
    """An optimizer whose parameters are buffers."""

    base: TorchOptimizer
    """The wrapped optimizer, over the buffers."""
    slots: Mapping[str, _Slot]
    """Name of a parameter to where it lies."""
    made: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Buffer and state to the tensor that states are brought into."""

    def groups(self) -> list[LiveGroup]:
        """Its groups with their hyper-parameters."""
        groups = []
        for own in self.base.groups():
            keys = frozenset(own.params)
            counts = {STEP: 0} if _stepper(self.base.handle, own.hyper) in _COUNT_IN_GROUP else {}
            names = tuple(name for name, slot in self.slots.items() if slot.key in keys)
            groups.append(LiveGroup(params=names, hyper={**counts, **own.hyper}))
        return groups

    def params(self, hyper: Sequence[Mapping[str, object]]) -> list[LiveParam]:
        """What it keeps of every parameter: that of its buffer."""
        keeps = {own.name: own.keeps for own in self.base.params(hyper)}
        return [
            LiveParam(
                name=name,
                keeps=keeps[slot.key],
                apart={state: slot.stretch(state).part for state in slot.buffer.apart},
            )
            for name, slot in self.slots.items()
        ]

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """The stretch of the parameter in a tensor for all of its buffer, padding zero."""
        slot = self.slots[name]
        if counts:
            return self.base.landing(slot.key, state, dtype, shape, counts=True)
        whole = self.made.get((slot.key, state))
        if whole is None:
            whole = self.base.landing(slot.key, state, dtype, slot.buffer.shape(state), counts=False)
            if whole is not self.base.held(slot.key).get(state):
                whole.zero_()
            self.made[slot.key, state] = whole
        return slot.stretch(state).of(whole)

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Take the tensors that stretches were brought into; a buffer counts the steps of all its parameters."""
        given: dict[str, dict[str, Mapping[str, torch.Tensor]]] = {}
        for name, own in states.items():
            given.setdefault(self.slots[name].key, {})[name] = own
        for key, members in given.items():
            stepped = [name for name, own in members.items() if own]
            if not stepped:
                self.base.put({key: {}}, {})
                continue
            for name in members.keys() - set(stepped):
                self._clear(name)
            own_counts = agreed_counts({own: members[own] for own in stepped}, counts, cure=_CURE)
            moments = {state: whole for (of, state), whole in self.made.items() if of == key}
            self.base.put({key: {**own_counts, **moments}}, {key: frozenset(own_counts)})
        self.made.clear()
        self._link()

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group."""
        self.base.put_hyper(hyper)

    def _clear(self, name: str) -> None:
        """Make the states of a parameter those of one that was never stepped, beside others of its buffer."""
        slot = self.slots[name]
        for (key, state), whole in self.made.items():
            if key == slot.key:
                slot.stretch(state).of(whole).zero_()

    def _link(self) -> None:
        """Let DeepSpeed's `safe_get_full_optimizer_state` find the states before the next step."""
        utils = importlib.import_module("deepspeed.utils")
        for slot in self.slots.values():
            state = self.base.handle.state.get(slot.buffer.tensor)
            if state and hasattr(slot.param, "_hp_mapping"):
                utils.lazy_init_hp_params_optimizer_state([slot.param], slot.buffer.tensor, self.base.handle.state)
