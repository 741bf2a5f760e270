"""Axes of a layout that no family speaks of: ranks that hold all of a tensor or none, and the placements of a DTensor.

A file tells placements by names, a live tensor by objects; what they mean is said here once.

    Shard(dim)                        chunk(dim)
    _StridedShard(dim, split_factor)  chunk(dim) after the axes that stand behind it and cut the same dim, as tensor
                                      parallelism cuts first; strided(dim, split_factor) where they do not make up
                                      the factor
    Replicate()                       replicate
    Partial("avg")                    partial; of other sums a part says nothing, and they are refused

Source: torch 2.13, `torch/distributed/tensor/{_dtensor_spec,placement_types}.py`.

>>> fsdp_after_tp = [Placement("_StridedShard", dim=0, factor=2), Placement("Shard", dim=0)]
>>> [f"{axis.axis}: {axis.pattern.name}" for axis in axes_of(["dp", "tp"], [4, 2], fsdp_after_tp, "an example")]
['tp: chunk(dim=0)', 'dp: chunk(dim=0)']
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ucp.contract.registry import pattern
from ucp.core.layout import AxisLayout, Pattern

_WHOLE = {"Replicate": "replicate", "Partial": "partial"}


@dataclass(frozen=True, slots=True)
class Placement:
    """How one axis of a mesh cuts a tensor."""

    kind: str
    """Name of its class in torch: Shard, _StridedShard, Replicate, Partial (of an average)"""
    dim: int = 0
    """Dim that is cut"""
    factor: int = 0
    """Parts that other axes cut it in before, of a strided one"""

    def pattern(self, *, in_order: bool) -> Pattern:
        """The pattern it is; `in_order`: the axes that cut before a strided one stand before it."""
        if self.kind in _WHOLE:
            return pattern(_WHOLE[self.kind])
        if self.kind == "Shard" or in_order:
            return pattern("chunk", dim=self.dim)
        return pattern("strided", dim=self.dim, split_factor=self.factor)


def axes_of(
    names: Sequence[str], sizes: Sequence[int], placements: Sequence[Placement], known_from: str
) -> tuple[AxisLayout, ...]:
    """Layout of each axis of a mesh, outermost first. `sizes`: ranks along each."""
    behind: dict[int, list[int]] = {}
    for at, own in enumerate(placements):
        if own.kind == "_StridedShard":
            cuts = [
                i for i in range(at + 1, len(sizes)) if placements[i].dim == own.dim and "Shard" in placements[i].kind
            ]
            if prod(sizes[i] for i in cuts) == own.factor:
                behind[at] = cuts
    order: list[int] = []
    for at in range(len(sizes)):
        order += [own for own in (*behind.get(at, ()), at) if own not in order]
    return tuple(
        AxisLayout(names[at], sizes[at], placements[at].pattern(in_order=at in behind), known_from) for at in order
    )


def along(axis: str, parts: int, known_from: str, holders: Collection[int] = ()) -> tuple[AxisLayout, ...]:
    """The axis, of `parts` ranks, of which `holders` (none: each) have all of a tensor; nothing for a single rank.

    >>> [own.pattern.name for holders in ({1}, {0, 3}) for own in along("pp", 4, "arguments", holders)]
    ['unique', 'replicate(holders=[0, 3])']
    """
    some = tuple(sorted(set(holders)))
    return () if parts == 1 else (_axis(axis, parts, known_from, some if len(some) < parts else ()),)


@lru_cache(maxsize=1 << 12)
def _axis(axis: str, parts: int, known_from: str, holders: tuple[int, ...]) -> AxisLayout:
    if len(holders) == 1:
        return AxisLayout(axis, parts, pattern("unique", owner=holders[0]), known_from)
    return AxisLayout(axis, parts, pattern("replicate", holders=holders), known_from)
