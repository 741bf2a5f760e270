"""An optimizer over flat tensors, each of which holds stretches of many parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ucp.core.dtypes import DType
from ucp.live.adapters import LiveModel
from ucp.live.match.groups import LiveGroup
from ucp.live.model.dtensor import local_of
from ucp.live.model.fsdp1 import FlatUnit
from ucp.live.optimizer.counts import agreed_counts
from ucp.live.optimizer.torch_optimizer import TorchOptimizer, describe_optimizer
from ucp.live.parts import LiveParam

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

__all__ = ["FlatOptimizer", "describe_flat_optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Where the states of a parameter lie."""

    key: str
    """What the optimizer beneath knows the tensor as."""
    start: int
    """First element of it."""
    numel: int
    """Elements held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOptimizer:
    """An optimizer whose parameters are flat tensors, or stretches of them."""

    base: TorchOptimizer
    """The optimizer, by the keys of its tensors."""
    slots: Mapping[str, _Slot]
    """Name of a parameter to where it lies."""
    made: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
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
        keeps = {own.name: own.keeps for own in self.base.params(hyper)}
        names = [name for group in self.groups() for name in group.params]
        return [
            LiveParam(name=name, keeps=keeps[self._slot(name).key])
            for name in names
            if self._slot(name).numel or self._slot(name).key != name
        ]

    def landing(self, name: str, state: str, dtype: DType, shape: tuple[int, ...], *, counts: bool) -> torch.Tensor:
        """The stretch of the parameter in a tensor for all of its neighbours, padding zero."""
        slot = self._slot(name)
        if counts or name not in self.slots:
            return self.base.landing(slot.key, state, dtype, shape, counts=counts)
        whole = self.made.get((slot.key, state))
        if whole is None:
            length = tuple(local_of(self.base.live[slot.key]).shape)
            whole = self.base.landing(slot.key, state, dtype, length, counts=False)
            if whole is not self.base.held(slot.key).get(state):
                whole.zero_()
            self.made[slot.key, state] = whole
        return whole.view(-1).narrow(0, slot.start, slot.numel)

    def put(self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]]) -> None:
        """Take the tensors that stretches were brought into; one tensor counts the steps of all in it."""
        given: dict[str, dict[str, Mapping[str, torch.Tensor]]] = {}
        for name, own in states.items():
            given.setdefault(self._slot(name).key, {})[name] = own
        for key, members in given.items():
            stepped = {name: own for name, own in members.items() if own}
            for name in (members.keys() - stepped.keys()) if stepped else ():
                self._clear(name)
            own_counts = agreed_counts(
                stepped, counts, cure="wrap with use_orig_params=True, or load without optimizer="
            )
            brought = {state: own for members in stepped.values() for state, own in members.items()}
            self.base.put({key: {**brought, **own_counts}}, {key: frozenset(own_counts)})
        self.made.clear()

    def put_hyper(self, hyper: Sequence[Mapping[str, object]]) -> None:
        """Set hyper-parameters of every group."""
        self.base.put_hyper(hyper)

    def _slot(self, name: str) -> _Slot:
        return self.slots.get(name) or _Slot(key=name, start=0, numel=self.base.live[name].numel())

    def _clear(self, name: str) -> None:
        """Make the states of a parameter those of one that no gradient ever reached, beside others of its tensor."""
        own = self.slots[name]
        for (key, _), whole in self.made.items():
            if key == own.key:
                whole.view(-1).narrow(0, own.start, own.numel).zero_()


def describe_flat_optimizer(optimizer: Optimizer, model: LiveModel, units: Sequence[FlatUnit]) -> FlatOptimizer:
    """The optimizer by names, over flat parameters of FSDP1 or stretches of them. Raises as `describe_optimizer`."""
    flat = {id(unit.flat): unit.key for unit in units if not unit.originals}
    slots = {
        own.names[0]: _Slot(
            key=own.names[0] if unit.originals else unit.key,
            start=0 if unit.originals else own.start,
            numel=own.numel,
        )
        for unit in units
        for own in unit.stretches
    }
    return FlatOptimizer(
        base=describe_optimizer(optimizer, replace(model, owners={**model.owners, **flat})), slots=slots
    )
