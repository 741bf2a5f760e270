"""Which expert-parallel ranks hold which experts, if the user says so.

>>> experts = ExpertMap.parse({0: [0, 1], 1: 1, 2: 0}, ep=2)
>>> experts.find_order(layer=0, ep=0), experts.find_order(layer=0, ep=1)
((0, 2), (0, 1))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ucp.contract.plugins import pattern
from ucp.core.layout import Pattern
from ucp.core.region import Box, RegionPair
from ucp.errors import UsageError

ExpertRanks: TypeAlias = Mapping[int, int | Sequence[int]]
"""Expert to the expert-parallel ranks that hold it; a rank that is listed twice holds two replicas."""
Experts: TypeAlias = ExpertRanks | Mapping[int, ExpertRanks]
"""Ranks of the experts of all layers, or by layer."""


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Which ranks hold which experts; empty if experts are assigned in order."""

    layers: Mapping[int | None, Mapping[int, tuple[int, ...]]]
    """Layer (None: all) to the ranks of each expert, in the order in which a rank holds its experts."""

    @classmethod
    def parse(cls, experts: Experts | None, *, ep: int) -> ExpertMap:
        """The map of the user. Raises UsageError for anything else, and for ranks not below `ep`."""
        if experts is None:
            return cls({})
        if not isinstance(experts, Mapping) or not experts:
            raise UsageError(f"expected experts as {{expert: ranks}} or {{layer: {{expert: ranks}}}}; got {experts!r}")
        by_layer = [isinstance(value, Mapping) for value in experts.values()]
        if all(by_layer):
            return cls({layer: _parse_ranks(value, f"layer {layer}: ", ep) for layer, value in experts.items()})
        if any(by_layer):
            raise UsageError("expected experts by layer for every layer, or for none; got both")
        return cls({None: _parse_ranks(experts, "", ep)})

    def find_order(self, *, layer: int | None, ep: int) -> tuple[int, ...] | None:
        """Experts that rank `ep` holds of a layer, in its order; None if the map does not name the layer."""
        experts = self.layers.get(layer, self.layers.get(None))
        if experts is None:
            return None
        return tuple(expert for expert, ranks in experts.items() for rank in ranks if rank == ep)

    def compare(self, count: int, *, layer: int | None) -> tuple[list[int], list[int]]:
        """For a layer of `count` experts: numbers in the map that are not among them, and those not in the map."""
        experts = self.layers.get(layer, self.layers.get(None))
        if experts is None:
            return [], []
        return sorted(set(experts) - {*range(count)}), sorted({*range(count)} - set(experts))

    def check_layers(self, layers: Collection[int | None]) -> None:
        """Raise UsageError for layers without experts in the map. `layers`: those that have some, on any rank."""
        unknown = [repr(layer) for layer in self.layers if layer is not None and layer not in layers]
        if unknown or (self.layers and not layers):
            known = ", ".join(str(layer) for layer in sorted(layer for layer in layers if layer is not None))
            got = f"layer {', '.join(unknown)}" if unknown else "all layers"
            raise UsageError(
                f"expected experts= for layers of the model that have experts ({known or 'none has a number'}); got "
                f"one for {got}"
            )

    def make_pattern(self, shape: tuple[int, ...], *, layer: int | None, ep: int) -> Pattern | None:
        """How a tensor of all experts of a layer, [experts, ...], is cut over `ep` ranks; None as for `find_order`."""
        copies: Counter[int] = Counter()
        pieces_of_ranks = []
        for rank in range(ep):
            order = self.find_order(layer=layer, ep=rank)
            if order is None:
                return None
            pairs = []
            for position, expert in enumerate(order):
                pairs.append(RegionPair(_slab(shape, expert), _slab(shape, position), copies[expert]))
                copies[expert] += 1
            pieces_of_ranks.append(tuple(pairs))
        return pattern("pieces", held=tuple(pieces_of_ranks))


def _slab(shape: tuple[int, ...], position: int) -> Box:
    return Box((position, *(0,) * (len(shape) - 1)), (1, *shape[1:]))


def _parse_ranks(experts: object, where: str, ep: int) -> dict[int, tuple[int, ...]]:
    ranks_of: dict[int, tuple[int, ...]] = {}
    for expert, value in experts.items() if isinstance(experts, Mapping) else ():
        ranks = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        if not _is_number(expert) or not ranks or not all(_is_number(rank) and rank < ep for rank in ranks):
            raise UsageError(
                f"expected experts by number, each with expert-parallel ranks from 0 to {ep - 1} (ep={ep} in the "
                f"topology); got {where}{expert!r}: {value!r}"
            )
        ranks_of[expert] = ranks
    return ranks_of


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
