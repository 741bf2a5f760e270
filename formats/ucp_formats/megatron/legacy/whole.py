"""The optimizer of every rank, not distributed: states by number, which are given their names back.

`Float16OptimizerWithFloat16Params` saves its masters in the order of its groups; torch's own state goes by number.
Names follow from the order in which the model registers its parameters, split by the rule of the groups. Masters prove
it: cast, they equal the weights. What is frozen is in no group: then contents say who fits, and the order who it is of
those (`matcher`). Where the order is another, every master is looked for by its contents alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from ucp.core.assign import narrow, narrow_in_order
from ucp.core.index import STEP, WEIGHT, ParamGroup
from ucp.core.tensor import DType, TensorRef
from ucp.errors import MalformedError, listed
from ucp.io.pickle.fields import integer, mapping, sequence, tensor
from ucp.transfer.probe import Prober
from ucp_formats.megatron.buffers.matcher import Fingerprints, ambiguity_error
from ucp_formats.megatron.buffers.state_buffer import StateBuffer
from ucp_formats.megatron.groups import DEFAULT_RULE, SavedGroup, assign_params, group_rule
from ucp_formats.megatron.legacy.atoms import LegacyStates, Optimizer, candidate
from ucp_formats.megatron.legacy.model import Held

_HALF = (DType.BFLOAT16, DType.FLOAT16)
_Row = list[list[int]]
"""For every entry of a group, the numbers of the parameters that it can be."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One parameter of the optimizer, without a name."""

    states: Mapping[object, object]
    """Its states."""
    master: TensorRef | None = None
    """Its fp32 copy, where it has one."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape that its tensors have; None where it has none."""
        tensors = [self.master, *self.states.values()]
        return next((own.shape for own in tensors if isinstance(own, TensorRef) and own.shape), None)


@dataclass(slots=True, kw_only=True)
class _Grouped:
    """A group of an optimizer."""

    saved: SavedGroup
    """Its hyper-parameters."""
    entries: list[_Entry]
    """Its parameters, in order."""
    masters: list[TensorRef] | None
    """Masters of those that have one, in order; None for an optimizer without masters."""
    named: Sequence[Held] = field(default_factory=list)
    """Who they are."""

    def give_masters(self, has_one: Sequence[bool]) -> bool:
        """Give every entry its master; False when there are more or fewer."""
        if self.masters is None:
            return True
        if sum(has_one) != len(self.masters):
            return False
        masters = iter(self.masters)
        for entry, has in zip(self.entries, has_one, strict=True):
            entry.master = next(masters) if has else None
        return True


def add_whole_optimizer(own: Optimizer, states: LegacyStates, prober: Prober) -> None:
    """Add the states of one optimizer to `states`. Raises MalformedError naming every parameter that stays open."""
    whole = _Whole(own, prober)
    if not whole.name_by_rule() and not whole.name_by_contents():
        states.notes.append(f"{own.where}: parameters are not in the usual order; found by their contents")
    elif all(group.masters is None for group in whole.groups):
        states.notes.append(f"{own.where} has no masters that prove the order of its parameters")
    for group in whole.groups:
        number = states.group(group.saved)
        for entry, held in zip(group.entries, group.named, strict=True):
            states.group_of[held.slot] = number
            tensors = {str(key): own for key, own in entry.states.items() if isinstance(own, TensorRef) and own.shape}
            if entry.master is not None:
                tensors = {WEIGHT: entry.master, **tensors}
            odd = [f"{key} {list(own.shape)}" for key, own in tensors.items() if own.shape != held.ref.shape]
            if odd:
                raise MalformedError(
                    f"expected states of {held.slot.key} of {list(held.ref.shape)}; got {', '.join(odd)}"
                )
            numbers = {str(key): own for key, own in entry.states.items() if key not in tensors and own is not None}
            if group.saved.hyper.get(STEP) is not None and STEP not in numbers and (tensors or numbers):
                numbers[STEP] = group.saved.hyper[STEP]
            states.tensors[held.slot] = tensors
            states.numbers[held.slot] = numbers


def _read(own: Optimizer) -> list[_Grouped]:
    where = own.where
    by_number = mapping(own.inner.get("state"), f"state of {where}")
    found = own.saved.get("fp32_from_fp16_params")
    masters = None if found is None else sequence(found, f"fp32_from_fp16_params of {where}")
    groups = []
    for number, (saved, params) in enumerate(own.groups()):
        numbers = [integer(param, f"a parameter of {where}") for param in params]
        entries = [_Entry(states=mapping(by_number.get(number, {}), where)) for number in numbers]
        row = None
        if masters is not None:
            listed_here = sequence(masters[number], where) if number < len(masters) else ()
            row = [tensor(master, f"a master in {where}") for master in listed_here]
        groups.append(_Grouped(saved=saved, entries=entries, masters=row))
    return groups


class _Whole:
    """An optimizer whose entries are given their names."""

    def __init__(self, own: Optimizer, prober: Prober) -> None:
        self.groups = _read(own)
        self._own = own
        self._held = own.held
        self._prober = prober

    @cached_property
    def _fingerprints(self) -> Fingerprints:
        return Fingerprints((candidate(str(number), own) for number, own in enumerate(self._held)), self._prober)

    @cached_property
    def _dealt_out(self) -> tuple[tuple[ParamGroup, ...], list[str]]:
        """Parameters by group, and those left: by the usual rule where arguments were not saved: contents prove it."""
        saved, arguments = [own.saved for own in self.groups], self._own.arguments
        rule = group_rule(arguments, [own.hyper for own in saved]) if arguments else DEFAULT_RULE
        return assign_params(saved, {held.name: held.ref.shape for held in self._held}, {}, rule)

    def name_by_rule(self) -> bool:
        """Name the entries by the order of the model; whether shapes and masters bear it out."""
        named = self._in_order()
        if named is None or not all(self._fits(entry, held) for entry, held in chain.from_iterable(named)):
            return False
        for own, pairs in zip(self.groups, named, strict=True):
            own.named = [held for _, held in pairs]
        return True

    def _in_order(self) -> list[list[tuple[_Entry, Held]]] | None:
        """Entries with their masters, and who they are by the order of the model; None where they are not as many."""
        by_name = {held.name: held for held in self._held}
        dealt, left = self._dealt_out
        pairs = []
        for own, params in zip(self.groups, dealt, strict=True):
            held = [by_name[name] for name in params.params]
            if len(held) != len(own.entries) or not own.give_masters([one.ref.dtype in _HALF for one in held]):
                return None
            pairs.append(list(zip(own.entries, held, strict=True)))
        return None if left else pairs

    def _fits(self, entry: _Entry, held: Held) -> bool:
        """Whether an entry can be the parameter: by shape, and by contents where it has a master."""
        if entry.shape not in (None, held.ref.shape) or entry.master is None:
            return entry.shape in (None, held.ref.shape)
        return self._fingerprints.is_stored_at(StateBuffer.from_tensor(entry.master, ""), 0, candidate("", held))

    def _fitting(self, entry: _Entry, *, bare: bool) -> list[int]:
        """Numbers of the parameters that an entry can be. `bare`: none has a master, so that shapes alone say."""
        allowed = [
            number
            for number, own in enumerate(self._held)
            if entry.shape in (None, own.ref.shape) and (bare or (own.ref.dtype in _HALF) == (entry.master is not None))
        ]
        if entry.master is None:
            return allowed
        found = self._fingerprints.find_candidates(StateBuffer.from_tensor(entry.master, ""), 0)
        return sorted({int(own.name) for own in found}.intersection(allowed))

    def name_by_contents(self) -> bool:
        """Name the entries where not all parameters are trained, or not in the usual order; whether they are in order.

        Raises MalformedError when an entry is of no parameter, or may be of several.
        """
        for own in self.groups:
            if own.masters and not own.give_masters([True] * len(own.entries)):
                raise MalformedError(self._refusal("not every parameter of it has a master"))
        fits = [[self._fitting(entry, bare=own.masters is None) for entry in own.entries] for own in self.groups]
        for own, row in zip(self.groups, fits, strict=True):
            for entry, numbers in zip(own.entries, row, strict=True):
                if not numbers:
                    raise MalformedError(self._refusal(f"one of shape {entry.shape} fits none of them"))
        numbers_of = {held.name: number for number, held in enumerate(self._held)}
        of_rule = [{numbers_of[name] for name in own.params} for own in self._dealt_out[0]]  # by the rule of groups
        ruled = [[[n for n in own if n in those] for own in row] for those, row in zip(of_rule, fits, strict=True)]
        chosen = narrow_in_order(ruled) or narrow_in_order(fits)
        found = chosen or narrow(fits)
        if any(not numbers for row in found for numbers in row):
            raise MalformedError(self._refusal("there are more of the same contents"))
        several = [
            f"parameter {position} of group {number}: "
            + ", ".join(f"{self._held[n].name} {list(self._held[n].ref.shape)}" for n in numbers[:4])
            for number, row in enumerate(found)
            for position, numbers in enumerate(row)
            if len(numbers) != 1
        ]
        if several:
            raise ambiguity_error(f"{self._own.where}: ", several)
        for own, row in zip(self.groups, found, strict=True):
            own.named = [self._held[numbers[0]] for numbers in row]
        return chosen is not None

    def _refusal(self, why: str) -> str:
        """Why states without names are of no parameter: masters that were changed, or all is of another order."""
        where = self._own.where
        pairs = (
            list(chain.from_iterable(self._in_order() or ()))
            if all(own.masters is not None for own in self.groups)
            else []
        )
        changed = [held for entry, held in pairs if not self._fits(entry, held)]
        has_shapes = all(entry.shape in (None, held.ref.shape) for entry, held in pairs)
        if changed and has_shapes and 2 * len(changed) < len(pairs):  # the order of the model holds for most
            return (
                f"{where}: expected masters (fp32_from_fp16_params) that equal the weights once they are cast to "
                "the type of the model; by the order of the model these do not:\n"
                f"{listed(f'{held.slot.key} {list(held.ref.shape)}' for held in changed)}\n"
                "Names of masters are not recorded: that they are the weights proves whose they are, so --drift cannot "
                "settle this. The files are of different steps or runs, or weights were changed after the last step: "
                "copy the files again. Where the change is meant, load the checkpoint in Megatron with --no-load-optim "
                "and save it anew: the masters are then made of the weights, and the moments start anew"
            )
        count = sum(len(own.entries) for own in self.groups)
        return (
            f"{where}: expected states of the parameters below, in the order of the model; got {count} without "
            f"names, and {why}:\n{listed(f'{held.slot.key} {list(held.ref.shape)}' for held in self._held)}\n"
            "The file is of another run than the model, or was changed by hand"
        )
