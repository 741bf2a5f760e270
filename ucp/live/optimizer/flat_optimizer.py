"""An optimizer over flat tensors, each of which holds stretches of many parameters.

FSDP1's flat parameters are such, and the buffers of DeepSpeed's optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ucp.core.tensor import DType
from ucp.errors import LoadError, listed
from ucp.live.adapters import LiveModel
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
    """Where the states of a parameter lie."""

    key: str
    """What the optimizer beneath knows the tensor as."""
    flat_range: FlatRange
    """What of it."""
    ranges_by_state: Mapping[str, FlatRange] = field(default_factory=dict)
    """States that lie otherwise."""

    def range_of(self, state: str) -> FlatRange:
        """Where a state of it lies."""
        return self.ranges_by_state.get(state, self.flat_range)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOptimizer:
    """An optimizer whose parameters are flat tensors, or stretches of them."""

    base: TorchOptimizer
    """The optimizer, by the keys of its tensors."""
    slots: Mapping[str, Slot]
    """Name of a parameter to where it lies."""
    remedy: str
    """What to do where parameters of one tensor were stepped at other counts."""
    shapes: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    """Key and state to its shape, where that is not the tensor's own."""
    flat_states: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Key and state to the memory that stretches are brought into."""

    def groups(self) -> list[LiveGroup]:
        """Its groups with their hyper-parameters."""
        members: dict[str, list[str]] = {}
        for name, slot in self.slots.items():
            members.setdefault(slot.key, []).append(name)
        return [
            replace(own, params=tuple(name for key in own.params for name in members.get(key, [key])))
            for own in self.base.groups()
        ]

    def params(self, hyper: Sequence[Mapping[str, object]]) -> list[LiveParam]:
        """What it keeps of every parameter of which this rank has elements: that of its tensor."""
        params = {param.name: param for param in self.base.params(hyper)}
        slots = {name: self._slot(name) for group in self.groups() for name in group.params}
        return [
            LiveParam(
                name=name,
                keeps=params[slot.key].keeps,
                apart={state: own.part for state, own in slot.ranges_by_state.items()},
                is_frozen=params[slot.key].is_frozen,
            )
            for name, slot in slots.items()
            if slot.flat_range.numel or slot.key != name
        ]

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """The stretch of the parameter in a tensor for all of its neighbours, padding zero."""
        slot = self._slot(name)
        if counts or name not in self.slots:
            return self.base.landing(slot.key, state, dtype, shape, counts=counts)
        whole = self.flat_states.get((slot.key, state))
        if whole is None:
            length = self.shapes.get((slot.key, state)) or tuple(local_of(self.base.live[slot.key]).shape)
            whole = self.base.landing(slot.key, state, dtype, length, counts=False)
            if whole is not self.base.current_states(slot.key).get(state):
                whole.zero_()
            self.flat_states[slot.key, state] = whole
        return slot.range_of(state).narrow(whole)

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Take the tensors that stretches were brought into; one tensor counts the steps of all in it."""
        given: dict[str, dict[str, Mapping[str, torch.Tensor]]] = {}
        for name, own in states.items():
            given.setdefault(self._slot(name).key, {})[name] = own
        for key, members in given.items():
            stepped = {name: own for name, own in members.items() if own}
            for name in (members.keys() - stepped.keys()) if stepped else ():
                # beside others of its tensor the states of a parameter that no gradient ever reached are zero
                for (_, state), whole in ((at, made) for at, made in self.flat_states.items() if at[0] == key):
                    self.slots[name].range_of(state).narrow(whole).zero_()
            own_counts = _agreed_counts(stepped, counts, cure=self.remedy)
            brought = {state: own for members in stepped.values() for state, own in members.items()}
            self.base.put({key: {**brought, **own_counts}}, {key: frozenset(own_counts)})
        self.flat_states.clear()

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group."""
        self.base.put_hyper(hyper)

    def _slot(self, name: str) -> Slot:
        if name in self.slots:
            return self.slots[name]
        own = self.base.live[name]
        return Slot(key=name, flat_range=FlatRange(start=0, numel=own.numel(), part=LivePart.full(tuple(own.shape))))


def describe_flat_optimizer(optimizer: Optimizer, model: LiveModel, units: Sequence[FlatUnit]) -> FlatOptimizer:
    """The optimizer by names, over flat parameters of FSDP1 or stretches of them. Raises as `describe_optimizer`."""
    flat = {id(unit.flat): unit.key for unit in units if not unit.originals}
    slots = {
        names[0]: Slot(key=names[0], flat_range=replace(own, start=0))
        if unit.originals
        else Slot(key=unit.key, flat_range=own)
        for unit in units
        for names, own in zip(unit.names, unit.ranges, strict=True)
    }
    return FlatOptimizer(
        base=describe_optimizer(optimizer, replace(model, owners={**model.owners, **flat})),
        slots=slots,
        remedy="wrap with use_orig_params=True, or load without optimizer=",
    )


def _agreed_counts(
    members: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]], *, cure: str
) -> dict[str, torch.Tensor]:
    """Counts that the parameters of one tensor have in common, by state. Raises LoadError where they differ."""
    steps: dict[str, dict[float, str]] = {}
    for name, states in members.items():
        for state in counts.get(name, ()):
            steps.setdefault(state, {}).setdefault(float(states[state].item()), name)
    differing = [
        ", ".join(f"{value:g} of {name}" for value, name in values.items()) + f" ({state})"
        for state, values in steps.items()
        if len(values) > 1
    ]
    if differing:
        raise LoadError(
            "expected one count of steps for all parameters that lie in one flat tensor; the checkpoint has\n"
            f"{listed(differing)}\n{cure}"
        )
    return {state: members[next(iter(values.values()))][state] for state, values in steps.items()}
