"""Which rank writes which part of which state. Pure: names, boxes and bytes go in, shares come out.

Ranks that hold the same boxes of a state hold the same bytes (data-parallel replicas, tied stages): one of them writes.

>>> box = Box((0,), (4,))
>>> replicated = [SaveItem(param="w", state=state, boxes=(box,), nbytes=16) for state in ("weight", "exp_avg")]
>>> shares = plan_save([replicated, replicated])
>>> [[item.state for item in share] for share in shares]
[['exp_avg'], ['weight']]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ucp.core.region import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveItem:
    """What a rank holds of a state; equal on all ranks that hold the same."""

    param: str
    """Parameter or buffer, by its name in the whole model."""
    state: str
    """Name of the state."""
    boxes: tuple[Box, ...]
    """Boxes of the global tensor, in the order in which the rank stores them."""
    nbytes: int
    """Bytes of these elements."""


def plan_save(items_by_rank: Sequence[Iterable[SaveItem]]) -> tuple[tuple[SaveItem, ...], ...]:
    """What each rank writes: every item once, by one of the ranks that hold it.

    `items_by_rank`: what each rank holds. Items of a single rank are its own; of the others, the largest goes first to
    the rank with the fewest bytes (MoC-System, adaptive sharding). All ranks compute the same shares.
    """
    holders: dict[SaveItem, list[int]] = {}
    for rank, items in enumerate(items_by_rank):
        for item in items:
            holders.setdefault(item, []).append(rank)
    loads = [0] * len(items_by_rank)
    writers: dict[SaveItem, int] = {}
    for item in sorted(holders, key=lambda item: (len(holders[item]) > 1, -item.nbytes, item.param, item.state)):
        writers[item] = min(holders[item], key=lambda rank: (loads[rank], rank))
        loads[writers[item]] += item.nbytes
    return tuple(
        tuple(item for item in dict.fromkeys(items) if writers[item] == rank)
        for rank, items in enumerate(items_by_rank)
    )
