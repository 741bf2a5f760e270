"""Which of several parameters of equal contents is where, by the order in which the model registers its parameters.

Norms that are all one and biases that are all zero have the same contents in every layer. A buffer holds parameters
in the reverse of registration order, so a place between two known ones is one of those registered between them. In
which order modules register theirs depends on their implementation, so several orders may be given: one that
contradicts the known places is put aside, and two that lead to different answers are an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ucp.errors import MalformedError, counted, listed
from ucp_formats.megatron.flat_buffer import Candidate

__all__ = ["Place", "settle"]


@dataclass(slots=True)
class Place:
    """A place where a parameter starts."""

    start: int
    """Its first element."""
    fits: list[Candidate]
    """Parameters whose contents stand there."""


def settle(places: Sequence[Place], orders: Sequence[Sequence[str]], where: str) -> list[Candidate]:
    """The parameter at every place.

    `orders`: names in the order of the buffer, as they may be. `where`: the buffer, for messages. Raises MalformedError
    naming all places that stay open.
    """
    known = [place.fits[0] for place in places if len(place.fits) == 1]
    if len(known) == len(places):
        return known
    attempts = [_Attempt(places, order).settled() for order in orders if _agrees(known, order)]
    whole = [[own for own in attempt if own is not None] for attempt in attempts if None not in attempt]
    answers = {tuple(own.name for own in answer): answer for answer in whole}
    if len(answers) == 1:
        return next(iter(answers.values()))
    names = [{own.name for own in answer if own is not None} for answer in zip(*attempts, strict=True)]
    open_ = [
        f"element {place.start}: {', '.join(own.name for own in place.fits[:4])}"
        for number, place in enumerate(places)
        if len(place.fits) > 1 and (not whole or len(names[number]) != 1)
    ]
    raise MalformedError(
        f"{where}: {counted(len(open_), 'parameter has', 'parameters have')} "
        f"the same contents as others, and their order does not tell them "
        f"apart:\n{listed(open_)}\nSave the checkpoint with --dist-ckpt-optim-fully-reshardable"
    )


def _agrees(known: Sequence[Candidate], order: Sequence[str]) -> bool:
    """Whether known parameters stand in that order."""
    ranks = {name: number for number, name in enumerate(order)}
    found = [ranks[own.name] for own in known if own.name in ranks]
    return len(found) == len(known) and all(a < b for a, b in pairwise(found))


class _Attempt:
    """One order, followed as far as it leads."""

    def __init__(self, places: Sequence[Place], order: Sequence[str]) -> None:
        self._places = places
        self._order = order
        self._rank = {name: number for number, name in enumerate(order)}
        self._settled = [place.fits[0] if len(place.fits) == 1 else None for place in places]
        self._taken = {own.name for own in self._settled if own is not None}

    def settled(self) -> list[Candidate | None]:
        """The parameter at every place, None where the order does not tell."""
        count = len(self._places)
        self._follow(range(count), step=1)
        self._follow(range(count - 1, -1, -1), step=-1)
        first = 0
        while first < count:
            stop = first + 1
            if self._settled[first] is None:
                while stop < count and self._settled[stop] is None:
                    stop += 1
                self._deal(first, stop)
            first = stop
        return self._settled

    def _follow(self, numbers: range, *, step: int) -> None:
        """Take the one that comes next to a known neighbour, where it fits."""
        before: Candidate | None = None
        for number in numbers:
            if self._settled[number] is None and before is not None:
                expected = self._next_to(before, step)
                own = next((fit for fit in self._places[number].fits if fit.name == expected), None)
                if own is not None:
                    self._take(number, own)
            before = self._settled[number]

    def _next_to(self, own: Candidate, step: int) -> str | None:
        at = self._rank[own.name] + step
        inside = 0 <= at < len(self._order) and self._order[at] not in self._taken
        return self._order[at] if inside else None

    def _take(self, number: int, own: Candidate) -> None:
        self._settled[number] = own
        self._taken.add(own.name)

    def _deal(self, first: int, stop: int) -> None:
        """Deal out a run of places that as many fit as there are places, in their order."""
        before = self._settled[first - 1] if first else None
        after = self._settled[stop] if stop < len(self._settled) else None
        low = -1 if before is None else self._rank[before.name]
        high = len(self._order) if after is None else self._rank[after.name]
        for number in range(first, stop):
            own_names = [own.name for own in self._places[number].fits]
            fits = [own for own in self._places[number].fits if low < self._rank.get(own.name, -1) < high]
            fits = [own for own in fits if own.name not in self._taken]
            alike = [later for later in range(number, stop) if own_names == [o.name for o in self._places[later].fits]]
            if fits and len(fits) == len(alike):
                self._take(number, min(fits, key=lambda fit: self._rank[fit.name]))
