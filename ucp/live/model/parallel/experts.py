"""Which expert-parallel ranks hold which experts, where a run says so itself.

>>> placed = ExpertMap.of({0: [0, 1], 1: 1, 2: 0}, ep=2)
>>> placed.order(layer=0, ep=0), placed.order(layer=0, ep=1)
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
"""Expert to the expert-parallel ranks that hold it; one that is named twice holds two replicas."""
Experts: TypeAlias = ExpertRanks | Mapping[int, ExpertRanks]
"""Ranks of the experts of all layers, or by layer."""


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Experts on ranks; nothing where the run deals them out in order."""

    layers: Mapping[int | None, Mapping[int, tuple[int, ...]]]
    """Layer (None: all) to the ranks of each expert, in the order in which a rank holds its experts."""

    @classmethod
    def of(cls, said: Experts | None, *, ep: int) -> ExpertMap:
        """What the user says. Raises UsageError for what is no such map, or names a rank that is none of `ep`."""
        if said is None:
            return cls({})
        if not isinstance(said, Mapping) or not said:
            raise UsageError(f"expected experts as {{expert: ranks}} or {{layer: {{expert: ranks}}}}; got {said!r}")
        by_layer = [isinstance(own, Mapping) for own in said.values()]
        if all(by_layer):
            return cls({layer: _ranks(own, f"layer {layer}: ", ep) for layer, own in said.items()})
        if any(by_layer):
            raise UsageError("expected experts by layer for every layer, or for none; got both")
        return cls({None: _ranks(said, "", ep)})

    def order(self, *, layer: int | None, ep: int) -> tuple[int, ...] | None:
        """Experts that rank `ep` holds of a layer, in its order; None where the map does not say."""
        own = self.layers.get(layer, self.layers.get(None))
        if own is None:
            return None
        return tuple(expert for expert, ranks in own.items() for rank in ranks if rank == ep)

    def differing(self, count: int, *, layer: int | None) -> tuple[list[int], list[int]]:
        """Experts of a layer that are named beyond `count`, and those below it that are left out."""
        own = self.layers.get(layer, self.layers.get(None))
        if own is None:
            return [], []
        return sorted(set(own) - {*range(count)}), sorted({*range(count)} - set(own))

    def check_layers(self, held: Collection[int | None]) -> None:
        """Raise UsageError where the map is of layers without experts. `held`: those that have some, on any rank."""
        odd = [repr(layer) for layer in self.layers if layer is not None and layer not in held]
        if odd or (self.layers and not held):
            shown = ", ".join(str(layer) for layer in sorted(own for own in held if own is not None))
            got = f"layer {', '.join(odd)}" if odd else "all layers"
            raise UsageError(
                f"expected experts of layers of the model that have some ({shown or 'none has a number'}); got a map "
                f"of {got}"
            )

    def pattern(self, shape: tuple[int, ...], *, layer: int | None, ep: int) -> Pattern | None:
        """How a tensor of all experts of a layer, [experts, ...], lies over `ep` ranks; None as for `order`."""
        orders = [self.order(layer=layer, ep=rank) for rank in range(ep)]
        copies: Counter[int] = Counter()
        held = []
        for order in orders:
            if order is None:
                return None
            pairs = []
            for at, expert in enumerate(order):
                pairs.append(RegionPair(_slab(shape, expert), _slab(shape, at), copies[expert]))
                copies[expert] += 1
            held.append(tuple(pairs))
        return pattern("pieces", held=tuple(held))


def _slab(shape: tuple[int, ...], at: int) -> Box:
    return Box((at, *(0,) * (len(shape) - 1)), (1, *shape[1:]))


def _ranks(said: object, where: str, ep: int) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for expert, given in said.items() if isinstance(said, Mapping) else ():
        ranks = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
        if not _is_number(expert) or not ranks or not all(_is_number(own) and own < ep for own in ranks):
            raise UsageError(
                f"expected experts by number, each with expert-parallel ranks from 0 to {ep - 1} (ep={ep} in the "
                f"topology); got {where}{expert!r}: {given!r}"
            )
        found[expert] = ranks
    return found


def _is_number(own: object) -> bool:
    return isinstance(own, int) and not isinstance(own, bool) and own >= 0
