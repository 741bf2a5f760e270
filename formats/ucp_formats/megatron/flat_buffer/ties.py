"""Which of several parameters of equal contents is where, by the order in which the model registers its parameters.

Norms that are all one and biases that are all zero have the same contents in every layer. Optimizers keep their
parameters in the order of registration, or in its reverse, and leave out what is frozen. So parameters are matched with
places in order: contents say what fits a place, and from place to place the order goes on, over as many parameters as
may be frozen or on other ranks. Matched from the front, every place gets the earliest parameter that it can have; from
the back, the latest. Where both are the same there is no other way; else the checkpoint does not say: an error.

>>> matched([[0, 1], [2], [1, 3]]), matched([[1], [0]])
(([0, 2, 3], [1, 2, 3]), None)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from ucp.errors import MalformedError, counted, listed
from ucp_formats.megatron.flat_buffer.boxes import Candidate

__all__ = ["Spot", "ambiguous", "in_groups", "matched", "settle", "without_order"]

_REMEDY = (
    "Which of them is trained, and which frozen, is recorded nowhere, so that their states would be guessed. Take the "
    "checkpoint of a later step, where their contents differ, or load this one in Megatron and save it with "
    "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, which records names. Where the states are not "
    "needed, save it with --no-save-optim: the weights are read without them"
)


@dataclass(slots=True, kw_only=True)
class Spot:
    """A place where a parameter starts."""

    where: str
    """The buffer, for messages."""
    start: int
    """Its first element."""
    fits: list[Candidate]
    """Parameters whose contents stand there, all of one length."""

    @property
    def stop(self) -> int:
        """One past the last element of a parameter there."""
        return self.start + self.fits[0].numel


def matched(fits: Sequence[Sequence[int]]) -> tuple[list[int], list[int]] | None:
    """The earliest and the latest number at every place, when they increase from place to place; None where none do.

    `fits`: numbers that a place can have. Every matching lies between the two.
    """
    first = _earliest(fits)
    last = _earliest([[-number for number in own] for own in reversed(fits)])
    return None if first is None or last is None else (first, [-number for number in reversed(last)])


def in_groups(fits: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]] | None:
    """Numbers that every place of every group can have, as they increase within a group and are in one group only.

    `fits`: numbers that contents allow. One number is left where there is no other way; None where there is none.
    """
    left = [[list(own) for own in row] for row in fits]
    while True:
        for row in left:
            extremes = matched(row)
            if extremes is None:
                return None
            for own, low, high in zip(row, *extremes, strict=True):
                own[:] = [number for number in own if low <= number <= high]
        if not _give_way([own for row in left for own in row]):
            return left


def without_order(fits: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    """Numbers that every place of every group can have, in whatever order; one number where there is no other way."""
    left = [[list(own) for own in row] for row in fits]
    while _give_way([own for row in left for own in row]):
        pass
    return left


def _give_way(places: Sequence[list[int]]) -> bool:
    """Take numbers that one place has for sure from all others; whether any was."""
    sure = {own[0]: number for number, own in enumerate(places) if len(own) == 1}
    changed = False
    for number, own in enumerate(places):
        kept = [n for n in own if sure.get(n, number) == number]
        changed = changed or len(kept) < len(own)
        own[:] = kept
    return changed


def _earliest(fits: Iterable[Sequence[int]]) -> list[int] | None:
    found: list[int] = []
    for own in fits:
        later = [number for number in own if not found or number > found[-1]]
        if not later:
            return None
        found.append(min(later))
    return found


def ambiguous(where: str, places: Sequence[str]) -> MalformedError:
    """The error that names places which several parameters of equal contents can have."""
    return MalformedError(
        f"{where}{counted(len(places), 'parameter has', 'parameters have')} the same contents as others, and their "
        f"order does not tell them apart:\n{listed(places)}\n{_REMEDY}"
    )


def settle(runs: Sequence[Sequence[Spot]], orders: Sequence[Sequence[str]]) -> list[Candidate]:
    """The parameter at every place of `runs`, one after the other.

    `runs`: places of buffers, each in its order; the buffers in that of the model, where that is known. `orders`: names
    in the order of the buffers, as they may be. Raises MalformedError naming all places that stay open.
    """
    places = list(chain.from_iterable(runs))
    if all(len(place.fits) == 1 for place in places):
        return [place.fits[0] for place in places]
    answers = [answer for order in orders for answer in _answers(places, order)]
    if not answers and len(runs) > 1:  # buffers are not in the order of the model: each by itself
        return [own for run in runs for own in settle([run], orders)]
    names = [{answer[number].name for answer in answers} for number in range(len(places))]
    open_ = [
        f"{place.where}, element {place.start}: {', '.join(own.name for own in place.fits[:4])}"
        for place, found in zip(places, names, strict=True)
        if len(place.fits) > 1 and len(found) != 1
    ]
    if open_:
        raise ambiguous("", open_)
    return answers[0]


def _answers(places: Sequence[Spot], order: Sequence[str]) -> list[list[Candidate]]:
    """The earliest and the latest answer that an order allows; none where known places contradict it."""
    ranks = {name: number for number, name in enumerate(order)}
    known = Counter(place.fits[0].name for place in places if len(place.fits) == 1)
    bound = [place for place in places if len(place.fits) > 1 or known[place.fits[0].name] == 1]  # no copies
    found = matched([[ranks[own.name] for own in place.fits if own.name in ranks] for place in bound])
    if found is None:
        return []
    answers = []
    for numbers in found:
        names = {id(place): order[number] for place, number in zip(bound, numbers, strict=True)}
        of_names = ({own.name: own for own in place.fits} for place in places)
        answers.append(
            [
                by_name.get(names.get(id(place), ""), place.fits[0])
                for place, by_name in zip(places, of_names, strict=True)
            ]
        )
    return answers
