"""In-order assignment: match the parameters of a model to slots, in registration order, if there is only one way.

Optimizers and flat buffers keep parameters in registration order without their names. Shapes or contents say which
parameters fit a slot. An answer is accepted only if no other is possible.

- `possible_places`: parameters fill groups of slots in order, and may be left out.
- `bounds`: the smallest and the largest number that each place can have, if numbers increase from place to place.
- `narrow_in_order`, `narrow`: numbers that each place can have, if no number occurs twice; within each row they
  increase, or are in any order.
- `deal`, without an order: which of its holders sends or writes each of some things.

>>> places = possible_places([[Slots(((2, 3),)), Slots(((2,), None))]], [[(2, 3), (2,), (4,)]])
>>> places
[{(0, 0)}, {(1, 0)}, {(1, 1)}]
>>> [len(options) for options in possible_places([[Slots(((2,),))]], [[(2,), (2,)]])]
[2, 2]
>>> bounds([[0, 1], [2], [1, 3]]), bounds([[1], [0]])
(([0, 2, 3], [1, 2, 3]), None)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

Place = tuple[int, int] | None
"""Number of a group and position in it; None for a parameter in no group."""

_State = tuple[int, tuple[int, ...]]
"""Stage of the current layer, and the filled length of every group."""


class ManyWaysError(ValueError):
    """There are too many partial assignments to check them all."""


def deal(holders: Iterable[Iterable[int]], nbytes: Iterable[int]) -> list[int | None]:
    """For each of some things, in order, the holder with the fewest bytes so far; None for one without holders.

    >>> deal([[0, 1], [0, 1], []], [4, 4, 4])
    [0, 1, None]
    """
    loads: Counter[int] = Counter()
    chosen = []
    for numbers, size in zip(holders, nbytes, strict=True):
        holder = min(numbers, key=lambda number: (loads[number], number), default=None)
        if holder is not None:
            loads[holder] += size
        chosen.append(holder)
    return chosen


@dataclass(frozen=True, slots=True)
class Slots:
    """A group with a slot per parameter."""

    forms: tuple[Hashable, ...]
    """Shape of each slot, or another property that its parameter has; None if unknown."""

    @property
    def length(self) -> int:
        """Position at which the group is full."""
        return len(self.forms)

    def after(self, position: int, form: Hashable) -> int | None:
        """Position after taking a parameter of `form` at position `position`; None if it does not fit."""
        return position + 1 if position < len(self.forms) and self.forms[position] in (None, form) else None


@dataclass(frozen=True, slots=True)
class FlatSlots:
    """A group stored as one flat tensor, of which only the total number of elements is known."""

    length: int
    """Elements."""

    def after(self, position: int, form: Hashable) -> int | None:
        """Position after taking a parameter of shape `form` at position `position`; None if it does not fit."""
        numel = _numel(form)
        return position + numel if numel and position + numel <= self.length else None


SlotGroup = Slots | FlatSlots


def _numel(form: Hashable) -> int:
    """Elements of a parameter, whose form is a shape here."""
    assert isinstance(form, tuple)
    return prod(form)


def possible_places(
    stages: Sequence[Sequence[SlotGroup]], layers: Iterable[Sequence[Hashable]], *, most: int = 2_000_000
) -> list[set[Place]] | None:
    """Places that each parameter can have in an assignment that fills all groups; None if there is no assignment.

    `stages`: groups of each pipeline stage; a stage is filled by consecutive layers. A model without stages has one.
    `layers`: forms of parameters, in the order of the model; shapes if a group is flat. `most`: partial assignments to
    examine. Raises ManyWaysError if there are more.
    """
    groups = [group for stage_groups in stages for group in stage_groups]
    stage_of = [stage for stage, stage_groups in enumerate(stages) for _ in stage_groups]
    params = [(form, position == 0) for layer in layers for position, form in enumerate(layer)]
    is_flat = [isinstance(group, FlatSlots) for group in groups]
    numels = [_numel(form) if any(is_flat) else 0 for form, _ in params]
    elements_after = [sum(numels) - used for used in accumulate(numels)]

    def steps(state: _State, param: int) -> Iterator[tuple[Place, _State]]:
        """Places of a parameter, as long as the parameters after it can still fill all groups."""
        stage, positions = state
        form, opens_layer = params[param]
        if opens_layer:  # it belongs to the next stage if this one is full
            filled = zip(groups, positions, stage_of, strict=True)
            open_stages = (of_group for group, position, of_group in filled if position < group.length)
            stage = min((open_stage for open_stage in open_stages if open_stage >= stage), default=stage)
        moves: list[tuple[Place, tuple[int, ...]]] = [(None, positions)]
        for number, group in enumerate(groups):
            after = group.after(positions[number], form) if stage_of[number] == stage else None
            if after is not None:
                moves.append(((number, positions[number]), (*positions[:number], after, *positions[number + 1 :])))
        for move, reached in moves:
            missing = [group.length - position for group, position in zip(groups, reached, strict=True)]
            flat = sum(length for length, in_elements in zip(missing, is_flat, strict=True) if in_elements)
            if sum(missing) - flat <= len(params) - param - 1 and flat <= elements_after[param]:
                yield move, (stage, reached)

    levels: list[set[_State]] = [{(0, (0,) * len(groups))}]
    for number in range(len(params)):
        levels.append({after for state in levels[-1] for _, after in steps(state, number)})
        most -= len(levels[-1])
        if most < 0:
            raise ManyWaysError(f"too many partial assignments of {len(params)} parameters to check them all")
    full = tuple(group.length for group in groups)
    alive = {state for state in levels[-1] if state[1] == full}
    places: list[set[Place]] = []
    for number in reversed(range(len(params))):
        leading = [
            (state, place) for state in levels[number] for place, after in steps(state, number) if after in alive
        ]
        places.append({place for _, place in leading})
        alive = {state for state, _ in leading}
    return places[::-1] if alive else None


def bounds(fits: Sequence[Sequence[int]]) -> tuple[list[int], list[int]] | None:
    """For every place, the smallest and the largest number it can have if numbers increase from place to place.

    None if no such assignment exists. `fits`: numbers that each place can have, in increasing order. The assignment is
    unique if and only if the bounds are equal.
    """
    first = _earliest(fits)
    last = _earliest([[-number for number in reversed(numbers)] for numbers in reversed(fits)])
    return None if first is None or last is None else (first, [-number for number in reversed(last)])


def _earliest(fits: Iterable[Sequence[int]]) -> list[int] | None:
    numbers: list[int] = []
    for candidates in fits:
        index = bisect_right(candidates, numbers[-1]) if numbers else 0
        if index == len(candidates):
            return None
        numbers.append(candidates[index])
    return numbers


def narrow_in_order(rows: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]] | None:
    """Numbers that every place can have, if they increase within a row and none occurs twice; None if impossible.

    `rows`: the numbers that contents allow for each place, in increasing order.
    """
    remaining = [[list(place) for place in row] for row in rows]
    while True:
        for row in remaining:
            extremes = bounds(row)
            if extremes is None:
                return None
            for place, low, high in zip(row, *extremes, strict=True):
                place[:] = [number for number in place if low <= number <= high]
        if not _exclude([place for row in remaining for place in row]):
            return remaining


def narrow(rows: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    """Numbers that every place can have, in any order, if none occurs twice."""
    remaining = [[list(place) for place in row] for row in rows]
    while _exclude([place for row in remaining for place in row]):
        pass
    return remaining


def _exclude(places: Sequence[list[int]]) -> bool:
    """Remove the numbers of places with a single one from all other places; whether that changed any."""
    sure = {place[0]: number for number, place in enumerate(places) if len(place) == 1}
    changed = False
    for number, place in enumerate(places):
        remaining = [candidate for candidate in place if sure.get(candidate, number) == number]
        changed = changed or len(remaining) < len(place)
        place[:] = remaining
    return changed
