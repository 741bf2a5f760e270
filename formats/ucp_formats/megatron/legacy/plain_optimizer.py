"""Finds the parameter names for a rank's optimizer, if it is not distributed: its states are saved by number.

`Float16OptimizerWithFloat16Params` saves masters in the order of its groups, and torch's state by number. Names follow
from the order in which the model registers its parameters, and from the rule that splits them into groups. The masters
verify the names: cast to the dtype of the model, they equal the weights. If parameters are frozen, or are in another
order, masters are matched by contents first, and then by order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from ucp.core.assign import narrow, narrow_in_order
from ucp.core.index import STEP, WEIGHT, ParamGroup
from ucp.core.tensor import DType, TensorRef
from ucp.errors import MalformedError, format_list
from ucp.io.pickle.fields import require_integer, require_mapping, require_sequence, require_tensor
from ucp.transfer.probe import Prober
from ucp_formats.megatron.buffers.matcher import Fingerprints, ambiguity_error
from ucp_formats.megatron.buffers.state_buffer import StateBuffer
from ucp_formats.megatron.groups import DEFAULT_RULE, SavedGroup, assign_params, group_rule
from ucp_formats.megatron.legacy.atoms import LegacyStates, RankOptimizer, to_candidate
from ucp_formats.megatron.legacy.model import RankParam

_HALF = (DType.BFLOAT16, DType.FLOAT16)


@dataclass(slots=True, kw_only=True)
class _OptimizerEntry:
    """One parameter of the optimizer, without a name."""

    states: Mapping[object, object]
    """State name to its value."""
    master: TensorRef | None = None
    """Its fp32 copy, if any."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of its tensors; None if it has no tensors."""
        tensors = [self.master, *self.states.values()]
        return next((value.shape for value in tensors if isinstance(value, TensorRef) and value.shape), None)


@dataclass(slots=True, kw_only=True)
class _Group:
    """A group of an optimizer."""

    saved: SavedGroup
    """Its hyper-parameters."""
    entries: list[_OptimizerEntry]
    """Its parameters, in order."""
    masters: list[TensorRef] | None
    """Masters of the entries that have one, in order; None for an optimizer without masters."""
    params: Sequence[RankParam] = field(default_factory=list)
    """The parameter of each entry."""

    def assign_masters(self, has_master: Sequence[bool]) -> bool:
        """Assign the masters to the entries that have one; False if their numbers differ."""
        if self.masters is None:
            return True
        if sum(has_master) != len(self.masters):
            return False
        masters = iter(self.masters)
        for entry, has in zip(self.entries, has_master, strict=True):
            entry.master = next(masters) if has else None
        return True


def add_plain_optimizer(optimizer: RankOptimizer, states: LegacyStates, prober: Prober) -> None:
    """Add the states of one optimizer to `states`.

    Raises MalformedError naming all entries that match no parameter, or several.
    """
    naming = _GroupNames(optimizer, prober)
    if not naming.name_by_rule() and not naming.name_by_contents():
        states.notes.append(f"{optimizer.where}: parameters are not in the usual order; found by their contents")
    elif all(group.masters is None for group in naming.groups):
        states.notes.append(f"{optimizer.where} has no masters, so the order of its parameters was not verified")
    for group in naming.groups:
        number = states.add_group(group.saved)
        for entry, param in zip(group.entries, group.params, strict=True):
            states.group_of[param.slot] = number
            tensors = {str(key): ref for key, ref in entry.states.items() if isinstance(ref, TensorRef) and ref.shape}
            if entry.master is not None:
                tensors = {WEIGHT: entry.master, **tensors}
            wrong = [f"{key} {list(ref.shape)}" for key, ref in tensors.items() if ref.shape != param.ref.shape]
            if wrong:
                raise MalformedError(
                    f"expected states of shape {list(param.ref.shape)} for {param.slot.key}; got {', '.join(wrong)}"
                )
            numbers = {str(key): v for key, v in entry.states.items() if key not in tensors and v is not None}
            if group.saved.hyper.get(STEP) is not None and STEP not in numbers and (tensors or numbers):
                numbers[STEP] = group.saved.hyper[STEP]
            states.tensors[param.slot] = tensors
            states.numbers[param.slot] = numbers


def _read_groups(optimizer: RankOptimizer) -> list[_Group]:
    where = optimizer.where
    by_number = require_mapping(optimizer.inner.get("state"), f"state of {where}")
    saved = optimizer.saved.get("fp32_from_fp16_params")
    masters_by_group = None if saved is None else require_sequence(saved, f"fp32_from_fp16_params of {where}")
    groups = []
    for number, (group, params) in enumerate(optimizer.groups()):
        numbers = [require_integer(param, f"a parameter of {where}") for param in params]
        entries = [_OptimizerEntry(states=require_mapping(by_number.get(number, {}), where)) for number in numbers]
        masters = None
        if masters_by_group is not None:
            values = require_sequence(masters_by_group[number], where) if number < len(masters_by_group) else ()
            masters = [require_tensor(value, f"a master in {where}") for value in values]
        groups.append(_Group(saved=group, entries=entries, masters=masters))
    return groups


class _GroupNames:
    """Finds the parameter of each entry of an optimizer."""

    def __init__(self, optimizer: RankOptimizer, prober: Prober) -> None:
        self.groups = _read_groups(optimizer)
        self._optimizer = optimizer
        self._params = optimizer.params
        self._prober = prober

    @cached_property
    def _fingerprints(self) -> Fingerprints:
        candidates = (to_candidate(str(number), param) for number, param in enumerate(self._params))
        return Fingerprints(candidates, self._prober)

    @cached_property
    def _groups_by_rule(self) -> tuple[tuple[ParamGroup, ...], list[str]]:
        """Parameters by group, and those in none. Without arguments: by the default rule, which contents verify."""
        saved, arguments = [group.saved for group in self.groups], self._optimizer.arguments
        rule = group_rule(arguments, [group.hyper for group in saved]) if arguments else DEFAULT_RULE
        return assign_params(saved, {param.name: param.ref.shape for param in self._params}, {}, rule)

    def name_by_rule(self) -> bool:
        """Name the entries by the order of the model. Returns whether shapes and masters confirm it."""
        pairs_by_group = self._pair_in_order()
        if pairs_by_group is None or not all(self._fits(*pair) for pair in chain.from_iterable(pairs_by_group)):
            return False
        for group, pairs in zip(self.groups, pairs_by_group, strict=True):
            group.params = [param for _, param in pairs]
        return True

    def _pair_in_order(self) -> list[list[tuple[_OptimizerEntry, RankParam]]] | None:
        """Entries, with their masters, and parameters in the order of the model; None if their numbers differ."""
        by_name = {param.name: param for param in self._params}
        rule_groups, ungrouped = self._groups_by_rule
        pairs = []
        for group, rule_group in zip(self.groups, rule_groups, strict=True):
            params = [by_name[name] for name in rule_group.params]
            has_master = [param.ref.dtype in _HALF for param in params]
            if len(params) != len(group.entries) or not group.assign_masters(has_master):
                return None
            pairs.append(list(zip(group.entries, params, strict=True)))
        return None if ungrouped else pairs

    def _fits(self, entry: _OptimizerEntry, param: RankParam) -> bool:
        """Whether an entry can be the parameter: by shape, and by contents if it has a master."""
        if entry.shape not in (None, param.ref.shape) or entry.master is None:
            return entry.shape in (None, param.ref.shape)
        return self._fingerprints.is_stored_at(StateBuffer.from_tensor(entry.master, ""), 0, to_candidate("", param))

    def _find_fitting(self, entry: _OptimizerEntry, *, has_masters: bool) -> list[int]:
        """Numbers of the parameters that an entry can be. `has_masters`: whether its optimizer has masters."""
        allowed = [
            number
            for number, param in enumerate(self._params)
            if entry.shape in (None, param.ref.shape)
            and (not has_masters or (param.ref.dtype in _HALF) == (entry.master is not None))
        ]
        if entry.master is None:
            return allowed
        equal = self._fingerprints.find_candidates(StateBuffer.from_tensor(entry.master, ""), 0)
        return sorted({int(candidate.name) for candidate in equal}.intersection(allowed))

    def name_by_contents(self) -> bool:
        """Name the entries by contents, as some parameters are frozen or the order is unusual.

        Returns whether the entries are in the order of the model. Raises MalformedError if one fits no parameter, or
        several.
        """
        for group in self.groups:
            if group.masters and not group.assign_masters([True] * len(group.entries)):
                raise MalformedError(self._explain("not every entry has a master"))
        fits = [
            [self._find_fitting(entry, has_masters=group.masters is not None) for entry in group.entries]
            for group in self.groups
        ]
        for group, row in zip(self.groups, fits, strict=True):
            for entry, numbers in zip(group.entries, row, strict=True):
                if not numbers:
                    raise MalformedError(self._explain(f"an entry of shape {entry.shape} fits none of them"))
        number_of = {param.name: number for number, param in enumerate(self._params)}
        by_rule = [{number_of[name] for name in group.params} for group in self._groups_by_rule[0]]
        in_group = [[[n for n in ns if n in rule] for ns in row] for rule, row in zip(by_rule, fits, strict=True)]
        in_order = narrow_in_order(in_group) or narrow_in_order(fits)
        answers = in_order or narrow(fits)
        if any(not numbers for row in answers for numbers in row):
            raise MalformedError(self._explain("several entries have the same contents"))
        open_entries = [
            f"parameter {position} of group {number}: "
            + ", ".join(f"{self._params[n].name} {list(self._params[n].ref.shape)}" for n in numbers[:4])
            for number, row in enumerate(answers)
            for position, numbers in enumerate(row)
            if len(numbers) != 1
        ]
        if open_entries:
            raise ambiguity_error(f"{self._optimizer.where}: ", open_entries)
        for group, row in zip(self.groups, answers, strict=True):
            group.params = [self._params[numbers[0]] for numbers in row]
        return in_order is not None

    def _explain(self, reason: str) -> str:
        """Message for entries that fit no parameter: a few masters were changed, or the file is from another run."""
        where = self._optimizer.where
        has_masters = all(group.masters is not None for group in self.groups)
        pairs = list(chain.from_iterable(self._pair_in_order() or ())) if has_masters else []
        changed = [param for entry, param in pairs if not self._fits(entry, param)]
        has_shapes = all(entry.shape in (None, param.ref.shape) for entry, param in pairs)
        if changed and has_shapes and 2 * len(changed) < len(pairs):  # the order of the model holds for most
            return (
                f"{where}: expected masters (fp32_from_fp16_params) that equal the weights when cast to the type of "
                "the model; in the order of the model, these do not:\n"
                f"{format_list(f'{param.slot.key} {list(param.ref.shape)}' for param in changed)}\n"
                "Masters are saved without names, and only equality with the weights identifies them, so --drift does "
                "not help. The files are from different steps or runs, or weights were changed after the last step: "
                "copy the files again. If the change is intended, load the checkpoint in Megatron with --no-load-optim "
                "and save it again: masters are then made from the weights, and the moments are reset"
            )
        count = sum(len(group.entries) for group in self.groups)
        return (
            f"{where}: expected states of the parameters below, in the order of the model; got {count} entries without "
            f"names, and {reason}:\n"
            f"{format_list(f'{param.slot.key} {list(param.ref.shape)}' for param in self._params)}\n"
            "The optimizer and the model are from different runs, or the file was changed by hand"
        )
