"""Which expert-parallel ranks hold which experts, if the user says so.

>>> experts = ExpertMap.parse({0: [0, 1], 1: 1, 2: 0}, ep=2)
>>> experts.find_order(layer=0, ep=0), experts.find_order(layer=0, ep=1)
((0, 2), (0, 1))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from ucp.contract.plugins import pattern
from ucp.core.layout import Pattern
from ucp.core.topology import PlacesExperts, list_experts
from ucp.errors import UsageError

ExpertRanks: TypeAlias = Mapping[int, int | Sequence[int]]
"""Expert to the expert-parallel ranks that hold it; a rank that is listed twice holds two replicas."""
PlacementLike: TypeAlias = ExpertRanks | Mapping[int, ExpertRanks] | PlacesExperts
"""Ranks of the experts of all layers, or by layer; or a placement, whose GPUs are the ranks."""


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Which ranks hold which experts; empty if experts are assigned in order."""

    layers: Mapping[int | None, tuple[tuple[int, ...], ...]]
    """Layer (None: all) to the experts of each rank, in its order."""

    @classmethod
    def parse(cls, placement: PlacementLike | None, *, ep: int) -> ExpertMap:
        """The map of the user. Raises UsageError for anything else, and for ranks not below `ep`."""
        if placement is None:
            return cls({})
        if isinstance(placement, PlacesExperts):
            return cls(dict(list_experts(placement, ep).items()))
        if not isinstance(placement, Mapping) or not placement:
            raise UsageError(
                "expected placement= as a ucp.Placement, {expert: ranks} or {layer: {expert: ranks}}; "
                f"got {placement!r}"
            )
        by_layer = [isinstance(value, Mapping) for value in placement.values()]
        if all(by_layer):
            return cls({layer: _parse_ranks(value, f"layer {layer}: ", ep) for layer, value in placement.items()})
        if any(by_layer):
            raise UsageError("expected placement= by layer for every layer, or for none; got both")
        return cls({None: _parse_ranks(placement, "", ep)})

    def find_order(self, *, layer: int | None, ep: int) -> tuple[int, ...] | None:
        """Experts that rank `ep` holds of a layer, in its order; None if the map does not name the layer."""
        ranks = self.layers.get(layer, self.layers.get(None))
        return None if ranks is None else ranks[ep]

    def compare(self, count: int, *, layer: int | None) -> tuple[list[int], list[int]]:
        """For a layer of `count` experts: numbers in the map that are not among them, and those not in the map."""
        ranks = self.layers.get(layer, self.layers.get(None))
        if ranks is None:
            return [], []
        experts = set(chain.from_iterable(ranks))
        return sorted(experts - {*range(count)}), sorted({*range(count)} - experts)

    def check_layers(self, layers: Collection[int | None]) -> None:
        """Raise UsageError for layers without experts in the map. `layers`: those that have some, on any rank."""
        unknown = [repr(layer) for layer in self.layers if layer is not None and layer not in layers]
        if unknown or (self.layers and not layers):
            known = ", ".join(str(layer) for layer in sorted(layer for layer in layers if layer is not None))
            got = f"layer {', '.join(unknown)}" if unknown else "all layers"
            raise UsageError(
                f"expected placement= for layers of the model that have experts ({known or 'none has a number'}); got "
                f"one for {got}"
            )

    def make_pattern(self, *, layer: int | None) -> Pattern | None:
        """How a tensor of all experts of a layer, [experts, ...], is cut over the ranks; None as for `find_order`."""
        by_rank = self.layers.get(layer, self.layers.get(None))
        return None if by_rank is None else pattern("indexes", by_part=by_rank)


def _parse_ranks(experts: object, where: str, ep: int) -> tuple[tuple[int, ...], ...]:
    """Experts of each rank."""
    by_rank: list[list[int]] = [[] for _ in range(ep)]
    for expert, value in experts.items() if isinstance(experts, Mapping) else ():
        ranks = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        if not _is_number(expert) or not ranks or not all(_is_number(rank) and rank < ep for rank in ranks):
            raise UsageError(
                f"expected experts by number, each with expert-parallel ranks from 0 to {ep - 1} (ep={ep} in the "
                f"topology); got {where}{expert!r}: {value!r}"
            )
        for rank in ranks:
            by_rank[rank].append(expert)
    return tuple(map(tuple, by_rank))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
