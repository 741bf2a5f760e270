"""Which parameter each slot of an optimizer is, where the checkpoint only numbers them.

Without ZeRO, the optimizer's state_dict has groups of numbered slots and no names. Two things are assumed, as they
hold for every optimizer built from `model.named_parameters()`: each group keeps the order of the model, and no
parameter is in two groups. All assignments of names to groups that then fit the shapes are counted; exactly one is
an answer, and nothing is guessed when there are several.

>>> pair = (Slots(shapes=((2, 3),)), Slots(shapes=((2,), None)))
>>> match(pair, [("w", (2, 3)), ("b", (2,)), ("frozen", (9, 9)), ("v", (4,))]).groups
Traceback (most recent call last):
ucp_formats.deepspeed.matching.AmbiguousError: frozen, v
>>> match(pair, [("w", (2, 3)), ("b", (2,)), ("v", (4,))]).groups
(('w',), ('b', 'v'))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ucp.io.fields import Shape

__all__ = ["AmbiguousError", "FlatSlots", "Match", "NoMatchError", "SlotGroup", "Slots", "match"]

_MOST_STATES = 200_000
"""Positions in the groups to keep track of; more means that almost anything fits."""

_State = tuple[int, ...]
"""How far each group is."""

_Level = dict[_State, list[tuple[_State, int]]]
"""States after some parameters, each with the states before and the group that took the parameter (-1: none)."""


class AmbiguousError(ValueError):
    """Several assignments fit; the arguments are the names that differ between two of them."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(self.args[0].split(", "))


class NoMatchError(ValueError):
    """No assignment fits."""


@dataclass(frozen=True, slots=True)
class Slots:
    """A group with a slot per parameter."""

    shapes: tuple[Shape | None, ...]
    """Shape of each slot; None where its states do not tell."""

    @property
    def length(self) -> int:
        """Where the group is full."""
        return len(self.shapes)

    def after(self, at: int, shape: Shape) -> int | None:
        """Position after taking a parameter of `shape` at position `at`; None if it does not fit."""
        if at < len(self.shapes) and self.shapes[at] in (None, shape):
            return at + 1
        return None


@dataclass(frozen=True, slots=True)
class FlatSlots:
    """A group that is one flat tensor; only the sum of its parameters is known."""

    length: int
    """Elements."""

    def after(self, at: int, shape: Shape) -> int | None:
        """Position after taking a parameter of `shape` at position `at`; None if it does not fit."""
        numel = prod(shape)
        return at + numel if numel and at + numel <= self.length else None


SlotGroup = Slots | FlatSlots


@dataclass(frozen=True, slots=True)
class Match:
    """The one assignment."""

    groups: tuple[tuple[str, ...], ...]
    """Names of each group, in order."""


def match(groups: Sequence[SlotGroup], params: Sequence[tuple[str, Shape]]) -> Match:
    """The assignment of `params` (name and shape, in the order of the model) to the slots of `groups`.

    Raises
    ------
    NoMatchError
        Nothing fits.
    AmbiguousError
        Several assignments do, or so many come near that they cannot be told apart.
    """
    end = tuple(group.length for group in groups)
    levels: list[_Level] = [{tuple(0 for _ in groups): []}]
    left = _Left(len(params), sum(prod(shape) for _, shape in params))
    for _, shape in params:
        left = _Left(left.params - 1, left.elements - prod(shape))
        reached = _step(levels[-1], groups, shape)
        levels.append({state: befores for state, befores in reached.items() if left.fill(groups, state)})
        if len(levels[-1]) > _MOST_STATES:
            raise AmbiguousError(name for name, _ in params)
    if end not in levels[-1]:
        raise NoMatchError
    first, *others = _two_paths(levels, end)
    if others:
        both = zip(params, first, others[0], strict=True)
        raise AmbiguousError(name for (name, _), one, other in both if one != other)
    taken: list[list[str]] = [[] for _ in groups]
    for (name, _), group in zip(params, first, strict=True):
        if group >= 0:
            taken[group].append(name)
    return Match(tuple(map(tuple, taken)))


@dataclass(frozen=True, slots=True)
class _Left:
    """What the parameters still to come can fill."""

    params: int
    """Parameters."""
    elements: int
    """Elements of all of them."""

    def fill(self, groups: Sequence[SlotGroup], state: _State) -> bool:
        """Whether they can fill what is open."""
        rests = [(group, group.length - at) for group, at in zip(groups, state, strict=True)]
        slots = sum(rest for group, rest in rests if isinstance(group, Slots))
        return slots <= self.params and sum(rest for _, rest in rests) - slots <= self.elements


def _step(level: _Level, groups: Sequence[SlotGroup], shape: Shape) -> _Level:
    """Every state that one more parameter leads to."""
    reached: _Level = {}
    for state in level:
        reached.setdefault(state, []).append((state, -1))
        for number, group in enumerate(groups):
            after = group.after(state[number], shape)
            if after is not None:
                follower = (*state[:number], after, *state[number + 1 :])
                reached.setdefault(follower, []).append((state, number))
    return reached


def _two_paths(levels: Sequence[_Level], end: _State) -> list[list[int]]:
    """At most two assignments that end in `end`: for each parameter the group that takes it, or -1."""
    found = []
    for path in _paths(levels, end):
        found.append(path)
        if len(found) == 2:
            break
    return found


def _paths(levels: Sequence[_Level], end: _State) -> Iterator[list[int]]:
    """Assignments, found backwards without recursion."""
    open_ends: list[tuple[_State, list[int]]] = [(end, [])]
    while open_ends:
        state, tail = open_ends.pop()
        if len(tail) == len(levels) - 1:
            yield tail[::-1]
            continue
        level = levels[len(levels) - 1 - len(tail)]
        open_ends += [(before, [*tail, group]) for before, group in level.get(state, ())]
