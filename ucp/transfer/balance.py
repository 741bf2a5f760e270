"""Share work out by bytes.

>>> [len(own) for own in bundle([_Sized(3), _Sized(3), _Sized(9), _Sized(1)], limit=6)]
[2, 1, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Protocol, TypeVar

__all__ = ["bundle", "interleave"]


class Sized(Protocol):
    """Anything that knows its bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes."""


@dataclass(frozen=True, slots=True)
class _Sized:
    nbytes: int


S = TypeVar("S", bound=Sized)
T = TypeVar("T")


def bundle(items: Iterable[S], *, limit: int) -> Iterator[list[S]]:
    """Neighbours together, in order, up to `limit` bytes; an item above it stands alone."""
    own: list[S] = []
    room = limit
    for item in items:
        if own and item.nbytes > room:
            yield own
            own, room = [], limit
        own.append(item)
        room -= item.nbytes
    if own:
        yield own


def interleave(items: Sequence[T], key: Callable[[T], Hashable]) -> list[T]:
    """One item of each key in turn, in order within a key: neighbours in time then differ in key, while keys last.

    >>> interleave(["a1", "a2", "a3", "b1", "c1"], key=lambda item: item[0])
    ['a1', 'b1', 'c1', 'a2', 'a3']
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    rounds = zip_longest(*([(item,) for item in group] for group in groups.values()), fillvalue=())
    return [item for turn in rounds for item in chain.from_iterable(turn)]
