"""Share work out by bytes.

>>> [len(own) for own in bundle([_Sized(3), _Sized(3), _Sized(9), _Sized(1)], limit=6)]
[2, 1, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["bundle"]


class Sized(Protocol):
    """Anything that knows its bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes."""


@dataclass(frozen=True, slots=True)
class _Sized:
    nbytes: int


S = TypeVar("S", bound=Sized)


def bundle(items: Sequence[S], *, limit: int) -> list[list[S]]:
    """Neighbours together, in order, up to `limit` bytes; an item above it stands alone."""
    bundles: list[list[S]] = []
    room = 0
    for item in items:
        if not bundles or item.nbytes > room:
            bundles.append([])
            room = limit
        bundles[-1].append(item)
        room -= item.nbytes
    return bundles
