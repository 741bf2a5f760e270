"""Which parameter each slot of an optimizer is, where the checkpoint only numbers them.

Without ZeRO, the optimizer's state_dict has groups of numbered slots and no names. Two things are assumed, as they
hold for every optimizer built from `model.named_parameters()`: each group keeps the order of the model, and no
parameter is in two groups. All assignments of names to groups that then fit the shapes are counted; exactly one is
an answer, and nothing is guessed when there are several.

A pipeline has an optimizer for each stage, over whole layers that follow one another (`match_stages`). Where all stages
together have as many slots as there are parameters, an assignment uses each of them, so that a stage ends where its
slots do, and layers that are alike are told apart too.

>>> pair = (Slots(shapes=((2, 3),)), Slots(shapes=((2,), None)))
>>> match_stages([pair], [[("w", (2, 3)), ("b", (2,)), ("frozen", (9, 9)), ("v", (4,))]])
Traceback (most recent call last):
ucp_formats.deepspeed.read.optimizer.match_slots.AmbiguousError: frozen, v
>>> match_stages([pair], [[("w", (2, 3)), ("b", (2,)), ("v", (4,))]])
((('w',), ('b', 'v')),)
>>> stage = (Slots(shapes=((2,), (2,))),)
>>> match_stages([stage, stage], [[(f"{n}.b", (2,))] for n in range(4)])
((('0.b', '1.b'),), (('2.b', '3.b'),))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ucp.io.pickle.fields import Shape

__all__ = ["AmbiguousError", "FlatSlots", "NoMatchError", "SlotGroup", "Slots", "match_stages"]

_MOST_STATES = 200_000
"""Positions in the groups to keep track of; more means that almost anything fits."""

_State = tuple[int, tuple[int, ...]]
"""The stage whose layer this is, and how far each group of every stage is."""

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


def match_stages(
    stages: Sequence[Sequence[SlotGroup]], layers: Iterable[Sequence[tuple[str, Shape]]]
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Names of each group of every stage, in order; `layers`: name and shape of parameters, in the order of the model.

    Raises NoMatchError, or AmbiguousError: also where so many come near that they cannot be told apart.
    """
    groups = [group for own in stages for group in own]
    owners = [stage for stage, own in enumerate(stages) for _ in own]
    params = [(name, shape, at == 0) for layer in layers for at, (name, shape) in enumerate(layer)]
    levels: list[_Level] = [{(0, (0,) * len(groups)): []}]
    left = _Left(len(params), sum(prod(shape) for _, shape, _ in params))
    for _, shape, opens_layer in params:
        left = _Left(left.params - 1, left.elements - prod(shape))
        starts = {state: _at_layer(state, groups, owners) if opens_layer else state for state in levels[-1]}
        reached = _step(starts, groups, owners, shape)
        levels.append({state: befores for state, befores in reached.items() if left.fill(groups, state[1])})
        if len(levels[-1]) > _MOST_STATES:
            raise AmbiguousError(name for name, _, _ in params)
    end = (len(stages) - 1, tuple(group.length for group in groups))
    if end not in levels[-1]:
        raise NoMatchError
    first, *others = _two_paths(levels, end)
    if others:
        both = zip(params, first, others[0], strict=True)
        raise AmbiguousError(name for (name, _, _), one, other in both if one != other)
    taken: list[list[str]] = [[] for _ in groups]
    for (name, _, _), group in zip(params, first, strict=True):
        if group >= 0:
            taken[group].append(name)
    by_group = list(zip(taken, owners, strict=True))
    return tuple(tuple(tuple(own) for own, of in by_group if of == stage) for stage in range(len(stages)))


@dataclass(frozen=True, slots=True)
class _Left:
    """What the parameters still to come can fill."""

    params: int
    """Parameters."""
    elements: int
    """Elements of all of them."""

    def fill(self, groups: Sequence[SlotGroup], positions: Sequence[int]) -> bool:
        """Whether they can fill what is open."""
        rests = [(group, group.length - at) for group, at in zip(groups, positions, strict=True)]
        slots = sum(rest for group, rest in rests if isinstance(group, Slots))
        return slots <= self.params and sum(rest for _, rest in rests) - slots <= self.elements


def _at_layer(state: _State, groups: Sequence[SlotGroup], owners: Sequence[int]) -> _State:
    """The state as a layer begins: it belongs to the next stage if that of the layer before is full."""
    stage, positions = state
    rests = {of for group, at, of in zip(groups, positions, owners, strict=True) if at < group.length}
    return min((of for of in rests if of >= stage), default=stage), positions


def _step(starts: Mapping[_State, _State], groups: Sequence[SlotGroup], owners: Sequence[int], shape: Shape) -> _Level:
    """Every state that one more parameter leads to; `starts`: states before it, as they are found and as they count."""
    reached: _Level = {}
    for found, (stage, positions) in starts.items():
        reached.setdefault((stage, positions), []).append((found, -1))
        for number, (group, owner) in enumerate(zip(groups, owners, strict=True)):
            after = group.after(positions[number], shape) if owner == stage else None
            if after is not None:
                follower = (stage, (*positions[:number], after, *positions[number + 1 :]))
                reached.setdefault(follower, []).append((found, number))
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
