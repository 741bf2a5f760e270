"""The optimizer of every rank, not distributed: states by number, which are given their names back.

`Float16OptimizerWithFloat16Params` saves its masters in the order of its groups; torch's own state goes by number.
Names follow from the order in which the model registers its parameters, split by the rule of the groups. Masters prove
it: cast, they equal the weights. What is frozen is in no group: then contents say who fits, and the order who it is of
those (`ties`). Where the order is another, every master is looked for by its contents alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ucp.core.dtypes import DType
from ucp.core.index import ParamGroup
from ucp.core.names import STEP, WEIGHT
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, listed
from ucp.io.pickle.fields import integer, mapping, sequence, tensor
from ucp.transfer.probe import Prober
from ucp_formats.megatron.flat_buffer.ties import ambiguous, in_groups, without_order
from ucp_formats.megatron.legacy.model import Held
from ucp_formats.megatron.legacy.optimizer.masters import is_master_of, mark
from ucp_formats.megatron.legacy.optimizer.states import LegacyStates, Population, groups_of
from ucp_formats.megatron.param_groups.rules import SavedGroup, dealt_out
from ucp_formats.megatron.param_groups.settings import USUAL, group_rule

__all__ = ["add_whole_optimizer", "is_whole"]

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
    named: list[Held] = field(default_factory=list)
    """Who they are."""


def is_whole(saved: object) -> bool:
    """Whether an optimizer has its states by number (and is not distributed)."""
    if not isinstance(saved, dict):
        return False
    inner = saved.get("optimizer")
    return "state" in saved or (isinstance(inner, dict) and "state" in inner)


def add_whole_optimizer(
    saved: Mapping[object, object], population: Population, states: LegacyStates, prober: Prober
) -> None:
    """Add the states of one optimizer to `states`. Raises MalformedError naming every parameter that stays open."""
    groups = _read(saved, population.where)
    if not _by_rule(groups, population, prober) and not _matched(groups, population, prober):
        states.notes.append(f"{population.where}: parameters are not in the usual order; found by their contents")
    elif all(own.masters is None for own in groups):
        states.notes.append(f"{population.where} has no masters that prove the order of its parameters")
    for own in groups:
        number = states.group(own.saved)
        for entry, held in zip(own.entries, own.named, strict=True):
            states.group_of[held.slot] = number
            _add_entry(entry, own.saved.hyper.get(STEP), held, states)


def _read(saved: Mapping[object, object], where: str) -> list[_Grouped]:
    inner = mapping(saved["optimizer"], where) if "optimizer" in saved else saved
    by_number = mapping(inner.get("state"), f"state of {where}")
    masters = saved.get("fp32_from_fp16_params")
    own_masters = None if masters is None else sequence(masters, f"fp32_from_fp16_params of {where}")
    groups = []
    for number, (saved_group, params) in enumerate(groups_of(inner.get("param_groups"), where, chain=None)):
        numbers = [integer(own, f"a parameter of {where}") for own in params]
        entries = [_Entry(states=mapping(by_number.get(own, {}), where)) for own in numbers]
        listed_masters = None
        if own_masters is not None:
            row = sequence(own_masters[number], where) if number < len(own_masters) else ()
            listed_masters = [tensor(own, f"a master in {where}") for own in row]
        groups.append(_Grouped(saved=saved_group, entries=entries, masters=listed_masters))
    return groups


def _by_rule(groups: Sequence[_Grouped], population: Population, prober: Prober) -> bool:
    """Name the entries by the order of the model; whether shapes and masters bear it out."""
    by_name = {held.name: held for held in population.held}
    split, left = _dealt_out(groups, population)
    if left:
        return False
    dealt_names = [[by_name[name] for name in dealt.params] for dealt in split]
    for own, named in zip(groups, dealt_names, strict=True):
        if len(named) != len(own.entries) or not _give_masters(own, [held.ref.dtype in _HALF for held in named]):
            return False
        if not all(_fits(entry, held, prober) for entry, held in zip(own.entries, named, strict=True)):
            return False
    for own, named in zip(groups, dealt_names, strict=True):
        own.named = named
    return True


def _dealt_out(groups: Sequence[_Grouped], population: Population) -> tuple[tuple[ParamGroup, ...], list[str]]:
    """Parameters by group, and those left: by the usual rule where arguments were not saved, for contents prove it."""
    saved = [own.saved for own in groups]
    rule = group_rule(population.arguments, [own.hyper for own in saved]) if population.arguments else USUAL
    return dealt_out(saved, {held.name: held.ref.shape for held in population.held}, {}, rule)


def _give_masters(group: _Grouped, is_half: Sequence[bool]) -> bool:
    """Give every entry its master; False when there are more or fewer."""
    if group.masters is None:
        return True
    if sum(is_half) != len(group.masters):
        return False
    masters = iter(group.masters)
    for entry, half in zip(group.entries, is_half, strict=True):
        entry.master = next(masters) if half else None
    return True


def _fits(entry: _Entry, held: Held, prober: Prober) -> bool:
    """Whether an entry can be the parameter: by shape, and by contents where it has a master."""
    if entry.shape not in (None, held.ref.shape):
        return False
    return entry.master is None or is_master_of(entry.master, held.ref, prober)


def _matched(groups: Sequence[_Grouped], population: Population, prober: Prober) -> bool:
    """Name the entries where not all parameters are trained, or not in the usual order; whether they are in order.

    Raises MalformedError when an entry is of no parameter, or may be of several.
    """
    for own in groups:
        if own.masters and (len(own.masters) != len(own.entries) or not _give_masters(own, [True] * len(own.entries))):
            raise MalformedError(_refusal(groups, population, "not every parameter of it has a master", prober))
    contents = _Contents(population.held, prober)
    fits = [[contents.fitting(entry, bare=own.masters is None) for entry in own.entries] for own in groups]
    for own, row in zip(groups, fits, strict=True):
        for entry, numbers in zip(own.entries, row, strict=True):
            if not numbers:
                why = f"one of shape {entry.shape} fits none of them"
                raise MalformedError(_refusal(groups, population, why, prober))
    chosen = in_groups(_ruled(groups, population, fits)) or in_groups(fits)
    found = chosen or without_order(fits)
    if any(not numbers for row in found for numbers in row):
        raise MalformedError(_refusal(groups, population, "there are more of the same contents", prober))
    _check_one_way(groups, population, found)
    for own, row in zip(groups, found, strict=True):
        own.named = [population.held[numbers[0]] for numbers in row]
    return chosen is not None


def _ruled(groups: Sequence[_Grouped], population: Population, fits: Sequence[_Row]) -> list[_Row]:
    """`fits` without parameters that the rule puts in another group."""
    numbers = {held.name: number for number, held in enumerate(population.held)}
    dealt, _ = _dealt_out(groups, population)
    inside = [{numbers[name] for name in own.params} for own in dealt]
    return [[[n for n in own if n in of_rule] for own in row] for of_rule, row in zip(inside, fits, strict=True)]


def _check_one_way(groups: Sequence[_Grouped], population: Population, found: Sequence[_Row]) -> None:
    """Raise MalformedError naming every entry that may be of several parameters."""
    several = [
        f"parameter {position} of group {number}: "
        + ", ".join(f"{population.held[n].name} {list(population.held[n].ref.shape)}" for n in numbers[:4])
        for number, row in enumerate(found)
        for position, numbers in enumerate(row)
        if len(numbers) != 1
    ]
    if several:
        raise ambiguous(f"{population.where}: ", several)


class _Contents:
    """Which parameters an entry can be: by shape, and by contents where it has a master."""

    def __init__(self, held: Sequence[Held], prober: Prober) -> None:
        self._held = held
        self._prober = prober
        self._marks: dict[tuple[tuple[int, ...], DType, bytes], list[int]] = {}
        for number, own in enumerate(held):
            key = (own.ref.shape, own.ref.dtype, mark(own.ref, own.ref.dtype, prober))
            self._marks.setdefault(key, []).append(number)

    def fitting(self, entry: _Entry, *, bare: bool) -> list[int]:
        """Their numbers. `bare`: no parameter of the optimizer has a master, so that shapes alone say."""
        if entry.master is None:
            return [
                number
                for number, own in enumerate(self._held)
                if entry.shape in (None, own.ref.shape) and (bare or own.ref.dtype not in _HALF)
            ]
        keys = [(entry.master.shape, dtype, mark(entry.master, dtype, self._prober)) for dtype in _HALF]
        return sorted(chain.from_iterable(self._marks.get(key, ()) for key in keys))


def _refusal(groups: Sequence[_Grouped], population: Population, why: str, prober: Prober) -> str:
    """Why states without names are of no parameter: masters that were changed, or all is of another order."""
    changed = _changed_masters(groups, population, prober)
    return _not_the_weights(changed, population) if changed else _unplaced(groups, population, why)


def _changed_masters(groups: Sequence[_Grouped], population: Population, prober: Prober) -> list[Held]:
    """Parameters whose master is not the weight, where the order of the model holds for most; else none."""
    by_name = {held.name: held for held in population.held}
    split, left = _dealt_out(groups, population)
    pairs: list[tuple[_Entry, Held]] = []
    for own, dealt in zip(groups, split, strict=True):
        named = [by_name[name] for name in dealt.params]
        if left or len(named) != len(own.entries):
            return []
        if own.masters is None or not _give_masters(own, [held.ref.dtype in _HALF for held in named]):
            return []
        pairs += zip(own.entries, named, strict=True)
    if any(entry.shape not in (None, held.ref.shape) for entry, held in pairs):
        return []
    wrong = [held for entry, held in pairs if not _fits(entry, held, prober)]
    return wrong if 2 * len(wrong) < len(pairs) else []


def _not_the_weights(changed: Sequence[Held], population: Population) -> str:
    return (
        f"{population.where}: expected masters (fp32_from_fp16_params) that equal the weights once they are cast to "
        "the type of the model; by the order of the model these do not:\n"
        f"{listed(f'{held.slot.key} {list(held.ref.shape)}' for held in changed)}\n"
        "Names of masters are not recorded: that they are the weights proves whose they are, so --drift cannot settle "
        "this. The files are of different steps or runs, or weights were changed after the last step: copy the files "
        "again. Where the change is meant, load the checkpoint in Megatron with --no-load-optim and save it anew: the "
        "masters are then made of the weights, and the moments start anew"
    )


def _unplaced(groups: Sequence[_Grouped], population: Population, why: str) -> str:
    count = sum(len(own.entries) for own in groups)
    named = {held.slot for held in chain.from_iterable(own.named for own in groups)}
    left = [f"{held.slot.key} {list(held.ref.shape)}" for held in population.held if held.slot not in named]
    return (
        f"{population.where}: expected states of the parameters below, in the order of the model; got {count} without "
        f"names, and {why}:\n{listed(left)}\nThe file is of another run than the model, or was changed by hand"
    )


def _add_entry(entry: _Entry, step: object, held: Held, states: LegacyStates) -> None:
    tensors = {str(key): own for key, own in entry.states.items() if isinstance(own, TensorRef) and own.shape}
    if entry.master is not None:
        tensors = {WEIGHT: entry.master, **tensors}
    odd = [f"{key} {list(own.shape)}" for key, own in tensors.items() if own.shape != held.ref.shape]
    if odd:
        raise MalformedError(f"expected states of {held.slot.key} of {list(held.ref.shape)}; got {', '.join(odd)}")
    numbers = {str(key): own for key, own in entry.states.items() if key not in tensors and own is not None}
    if step is not None and STEP not in numbers and (tensors or numbers):
        numbers[STEP] = step
    states.tensors[held.slot] = tensors
    states.numbers[held.slot] = numbers
