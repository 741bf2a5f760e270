"""In-order assignment: the one way to give places the parameters of a model, in its order, if there is just one.

Optimizers and flat buffers number their parameters, and keep them in the order in which a model registers them: the
names are recorded nowhere. Shapes or contents say which parameters fit a place. An answer is believed only where no
other is possible; else all that differ are named.

- `possible_places`: parameters of a model are dealt to groups of slots, which they fill in order; any may be left out.
- `bounds`: places that increase in one order: the earliest and the latest that each can have.
- `narrow_in_order`, `narrow`: several such rows, or rows in no order, in which nothing may come twice.

>>> places = possible_places([[Slots(((2, 3),)), Slots(((2,), None))]], [[(2, 3), (2,), (4,)]])
>>> places
[{(0, 0)}, {(1, 0)}, {(1, 1)}]
>>> [len(own) for own in possible_places([[Slots(((2,),))]], [[(2,), (2,)]])]
[2, 2]
>>> bounds([[0, 1], [2], [1, 3]]), bounds([[1], [0]])
(([0, 2, 3], [1, 2, 3]), None)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

Place = tuple[int, int] | None
"""Number of a group, and position within it; None for a parameter that is in no group."""

_State = tuple[int, tuple[int, ...]]
"""The stage whose layer this is, and how far each group of every stage is filled."""


class ManyWaysError(ValueError):
    """So many assignments come near that they are not all looked at."""


@dataclass(frozen=True, slots=True)
class Slots:
    """A group with a slot per parameter."""

    forms: tuple[Hashable, ...]
    """Shape of each slot, or whatever else a parameter has in common with it; None where that is not known."""

    @property
    def length(self) -> int:
        """Where the group is full."""
        return len(self.forms)

    def after(self, at: int, form: Hashable) -> int | None:
        """Position after taking a parameter of `form` at position `at`; None if it does not fit."""
        return at + 1 if at < len(self.forms) and self.forms[at] in (None, form) else None


@dataclass(frozen=True, slots=True)
class FlatSlots:
    """A group that is one flat tensor; only the sum of its parameters is known."""

    length: int
    """Elements."""

    def after(self, at: int, form: Hashable) -> int | None:
        """Position after taking a parameter of shape `form` at position `at`; None if it does not fit."""
        numel = _numel(form)
        return at + numel if numel and at + numel <= self.length else None


SlotGroup = Slots | FlatSlots


def _numel(form: Hashable) -> int:
    """Elements of a parameter; beside flat groups, forms are shapes."""
    assert isinstance(form, tuple)
    return prod(form)


def possible_places(
    stages: Sequence[Sequence[SlotGroup]], layers: Iterable[Sequence[Hashable]], *, most: int = 2_000_000
) -> list[set[Place]] | None:
    """Places that each parameter has in some assignment that fills all groups; None where there is none.

    `stages`: groups that are filled by whole layers which follow one another; one for a model that is not cut into
    stages. `layers`: forms of parameters, in the order of the model; shapes where a group is flat. `most`: states to
    look at. Raises ManyWaysError where there are more.
    """
    groups = [group for own in stages for group in own]
    owners = [stage for stage, own in enumerate(stages) for _ in own]
    params = [(form, at == 0) for layer in layers for at, form in enumerate(layer)]
    is_flat = [isinstance(group, FlatSlots) for group in groups]
    numels = [_numel(form) if any(is_flat) else 0 for form, _ in params]
    elements = [sum(numels) - used for used in accumulate(numels)]

    def steps(state: _State, at: int) -> Iterator[tuple[Place, _State]]:
        """Where parameter number `at` can go, as long as those after it can still fill all groups."""
        stage, positions = state
        form, opens_layer = params[at]
        if opens_layer:  # which is the next stage's if that of the layer before is full
            rests = (of for group, own, of in zip(groups, positions, owners, strict=True) if own < group.length)
            stage = min((of for of in rests if of >= stage), default=stage)
        moves: list[tuple[Place, tuple[int, ...]]] = [(None, positions)]
        for number, group in enumerate(groups):
            after = group.after(positions[number], form) if owners[number] == stage else None
            if after is not None:
                place = number, positions[number]
                moves.append((place, (*positions[:number], after, *positions[number + 1 :])))
        for move, reached in moves:
            rest = [group.length - own for group, own in zip(groups, reached, strict=True)]
            flat = sum(own for own, of_elements in zip(rest, is_flat, strict=True) if of_elements)
            if sum(rest) - flat <= len(params) - at - 1 and flat <= elements[at]:
                yield move, (stage, reached)

    levels: list[set[_State]] = [{(0, (0,) * len(groups))}]
    for at in range(len(params)):
        levels.append({after for state in levels[-1] for _, after in steps(state, at)})
        most -= len(levels[-1])
        if most < 0:
            raise ManyWaysError(f"too many assignments of {len(params)} parameters come near")
    full = tuple(group.length for group in groups)
    alive = {state for state in levels[-1] if state[1] == full}
    places: list[set[Place]] = []
    for at in reversed(range(len(params))):
        leading = [(state, place) for state in levels[at] for place, after in steps(state, at) if after in alive]
        places.append({place for _, place in leading})
        alive = {state for state, _ in leading}
    return places[::-1] if alive else None


def bounds(fits: Sequence[Sequence[int]]) -> tuple[list[int], list[int]] | None:
    """The earliest and the latest number at every place, when they increase from place to place; None where none do.

    `fits`: numbers that a place can have, in increasing order. Every assignment lies between the two, so that there is
    one only where they are equal.
    """
    first = _earliest(fits)
    last = _earliest([[-number for number in reversed(own)] for own in reversed(fits)])
    return None if first is None or last is None else (first, [-number for number in reversed(last)])


def _earliest(fits: Iterable[Sequence[int]]) -> list[int] | None:
    numbers: list[int] = []
    for own in fits:
        at = bisect_right(own, numbers[-1]) if numbers else 0
        if at == len(own):
            return None
        numbers.append(own[at])
    return numbers


def narrow_in_order(rows: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]] | None:
    """Numbers that every place of every row can have, as they increase within a row and are in one row only.

    `rows`: numbers that contents allow, in increasing order. One number is left where there is no other way; None
    where there is none.
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
    """Numbers that every place of every row can have, in whatever order; one number where there is no other way."""
    remaining = [[list(place) for place in row] for row in rows]
    while _exclude([place for row in remaining for place in row]):
        pass
    return remaining


def _exclude(places: Sequence[list[int]]) -> bool:
    """Take numbers that one place has for sure from all others; whether any was."""
    sure = {place[0]: number for number, place in enumerate(places) if len(place) == 1}
    changed = False
    for number, place in enumerate(places):
        others = [own for own in place if sure.get(own, number) == number]
        changed = changed or len(others) < len(place)
        place[:] = others
    return changed
