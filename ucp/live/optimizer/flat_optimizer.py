"""An optimizer over flat tensors, each of which holds ranges of many parameters.

Examples are FSDP1's flat parameters and the buffers of DeepSpeed's optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ucp.core.tensor import DType
from ucp.errors import LoadError, format_list
from ucp.live.adapters import LiveModel, State
from ucp.live.match.groups import LiveGroup
from ucp.live.model.dtensor import local_of
from ucp.live.model.wrappers import FlatUnit
from ucp.live.optimizer.torch_optimizer import TorchOptimizer, describe_optimizer
from ucp.live.parts import FlatRange, LiveParam, LivePart

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Which range of a flat tensor, and of its states, a parameter has."""

    key: str
    """Name of the flat tensor in the inner optimizer."""
    flat_range: FlatRange
    """Range of the tensor, and of its states."""
    ranges_by_state: Mapping[str, FlatRange] = field(default_factory=dict)
    """State to its range, for states in another range."""

    def range_of(self, state: str) -> FlatRange:
        """The range of a state."""
        return self.ranges_by_state.get(state, self.flat_range)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOptimizer:
    """An optimizer whose parameters are flat tensors, or ranges of them (`LiveOptimizer`)."""

    base: TorchOptimizer
    """The inner optimizer; its parameters are the flat tensors, by their keys."""
    slots: Mapping[str, Slot]
    """Name of a parameter to its range."""
    remedy: str
    """What to do if parameters of one tensor have different step counts."""
    shapes: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    """Key and state to its shape, if that is not the tensor's."""
    flat_states: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Key and state to the flat tensor that ranges are loaded into."""

    def groups(self) -> list[LiveGroup]:
        """Its groups with their hyper-parameters."""
        members: dict[str, list[str]] = {}
        for name, slot in self.slots.items():
            members.setdefault(slot.key, []).append(name)
        return [
            replace(group, params=tuple(name for key in group.params for name in members.get(key, [key])))
            for group in self.base.groups()
        ]

    def params(self, hyper: Sequence[Mapping[str, object]]) -> list[LiveParam]:
        """The states that it keeps for parameters with elements on this rank: those of their flat tensors."""
        tensors = {tensor.name: tensor for tensor in self.base.params(hyper)}
        params = []
        for name in (name for group in self.groups() for name in group.params):
            slot = self._find_slot(name)
            parts_by_state = {state: flat_range.part for state, flat_range in slot.ranges_by_state.items()}
            if slot.flat_range.numel or slot.key != name:
                params.append(replace(tensors[slot.key], name=name, apart=parts_by_state))
        return params

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """The range of the parameter in a flat tensor; its padding is zero."""
        slot = self._find_slot(name)
        if counts or name not in self.slots:
            return self.base.landing(slot.key, state, dtype, shape, counts=counts)
        key = slot.key, state
        if key not in self.flat_states:
            flat_shape = self.shapes.get(key) or tuple(local_of(self.base.live[slot.key]).shape)
            tensor = self.base.landing(slot.key, state, dtype, flat_shape, counts=False)
            if tensor is not self.base.current_states(slot.key).get(state):
                tensor.zero_()
            self.flat_states[key] = tensor
        return slot.range_of(state).narrow(self.flat_states[key])

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Set the flat tensors that ranges were loaded into; parameters in one tensor share a step count."""
        by_key: dict[str, dict[str, Mapping[str, torch.Tensor]]] = {}
        for name, values in states.items():
            by_key.setdefault(self._find_slot(name).key, {})[name] = values
        for key, members in by_key.items():
            members_with_states = {name: values for name, values in members.items() if values}
            for name in (members.keys() - members_with_states.keys()) if members_with_states else ():
                # a parameter that never had a gradient has zeros there, if others in the tensor have states
                for (tensor_key, state), tensor in self.flat_states.items():
                    if tensor_key == key:
                        self.slots[name].range_of(state).narrow(tensor).zero_()
            agreed = _merge_counts(members_with_states, counts, remedy=self.remedy)
            merged = {state: value for values in members_with_states.values() for state, value in values.items()}
            self.base.put({key: {**merged, **agreed}}, {key: frozenset(agreed)})
        self.flat_states.clear()

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group."""
        self.base.put_hyper(hyper)

    def values(self, name: str) -> dict[str, State]:
        """What it holds for a parameter now: its ranges of flat tensors, and the count of their steps."""
        import torch

        slot = self._find_slot(name)
        numel = local_of(self.base.live[slot.key]).numel()
        return {
            state: value
            if not isinstance(value, torch.Tensor) or not value.ndim or value.numel() == 1 != numel
            else slot.range_of(state).narrow(local_of(value))
            for state, value in self.base.values(slot.key).items()
        }

    def _find_slot(self, name: str) -> Slot:
        if name in self.slots:
            return self.slots[name]
        param = self.base.live[name]
        full = FlatRange(start=0, numel=param.numel(), part=LivePart.full(tuple(param.shape)))
        return Slot(key=name, flat_range=full)


def describe_flat_optimizer(optimizer: Optimizer, model: LiveModel, units: Sequence[FlatUnit]) -> FlatOptimizer:
    """The optimizer by names, over flat parameters of FSDP1 or ranges of them. Raises as `describe_optimizer`."""
    slots = {}
    for unit in units:
        for (name, *_), flat_range in zip(unit.names, unit.ranges, strict=True):
            own_tensor = Slot(key=name, flat_range=replace(flat_range, start=0))
            slots[name] = own_tensor if unit.originals else Slot(key=unit.key, flat_range=flat_range)
    flat = {id(unit.flat): unit.key for unit in units if not unit.originals}
    return FlatOptimizer(
        base=describe_optimizer(optimizer, replace(model, owners={**model.owners, **flat})),
        slots=slots,
        remedy="wrap with use_orig_params=True, or load without optimizer=",
    )


def _merge_counts(
    members: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]], *, remedy: str
) -> dict[str, torch.Tensor]:
    """The counts that all parameters of one tensor share, by state. Raises LoadError if they differ."""
    names_by_value: dict[str, dict[float, str]] = {}
    for name, states in members.items():
        for state in counts.get(name, ()):
            names_by_value.setdefault(state, {}).setdefault(float(states[state].item()), name)
    differing = [
        ", ".join(f"{value:g} for {name}" for value, name in names.items()) + f" ({state})"
        for state, names in names_by_value.items()
        if len(names) > 1
    ]
    if differing:
        raise LoadError(
            "expected one step count for all parameters in one flat tensor; the checkpoint has\n"
            f"{format_list(differing)}\n{remedy}"
        )
    return {state: members[next(iter(names.values()))][state] for state, names in names_by_value.items()}
