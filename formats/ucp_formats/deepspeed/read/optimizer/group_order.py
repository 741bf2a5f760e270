"""The order of parameters in the buffers of ZeRO-1/2, and what other records say of it.

`param_shapes` is in the order of the buffer, always. The optimizer's own order differs from it under
`round_robin_gradients`, which deals the parameters out to the ranks like cards. `param_slice_mappings` follows the
optimizer's order, and up to 0.19.8 gives wrong offsets when the two differ: it is compared, never used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ucp.core.pickle_values import Stub
from ucp_formats.deepspeed.partition import round_robin
from ucp_formats.deepspeed.read.optimizer.flat_layout import Held

__all__ = ["dealt_back", "mapping_disagrees", "optimizer_order"]


def optimizer_order(
    names: Sequence[str], *, ranks: int, dealt: bool, mappings: Sequence[object]
) -> tuple[tuple[str, ...], bool]:
    """Names of a group in the order of its optimizer, and whether they were dealt out.

    Parameters
    ----------
    names
        In the order of the buffer.
    dealt
        Whether the configuration says so.
    mappings
        `param_slice_mappings` of the group on each rank; each lists names in the optimizer's order.
    """
    orders = {False: tuple(names), True: dealt_back(names, ranks=ranks)}
    listed = [tuple(own) for own in mappings if isinstance(own, dict)]
    fits = {key: all(_is_in_order(own, order) for own in listed) for key, order in orders.items()}
    chosen = dealt if fits[dealt] or not fits[not dealt] else not dealt
    return orders[chosen], chosen


def dealt_back(names: Sequence[str], *, ranks: int) -> tuple[str, ...]:
    """Order before `round_robin`.

    >>> dealt_back(("a", "c", "e", "b", "d"), ranks=2)
    ('a', 'b', 'c', 'd', 'e')
    """
    places = [int(place) for place in round_robin([str(at) for at in range(len(names))], ranks=ranks)]
    return tuple(name for _, name in sorted(zip(places, names, strict=True)))


def mapping_disagrees(held: Mapping[str, Held], recorded: object) -> list[str]:
    """Parameters of which `param_slice_mappings` of a rank says another place than they have; `held`: what it has."""
    if not isinstance(recorded, dict):
        return []
    told = {name: place for name, fragment in recorded.items() if (place := _place(fragment)) is not None}
    has = {name: (own.offset, own.numel) for name, own in held.items()}
    return [str(name) for name in {**told, **has} if told.get(name) != has.get(str(name))]


def _place(fragment: object) -> tuple[int, int] | None:
    """Start and elements of a `fragment_address`; None for one of no elements."""
    if not isinstance(fragment, Stub):
        return None
    start, numel = fragment.attribute("start"), fragment.attribute("numel")
    if not isinstance(start, int) and len(fragment.args) == 2:
        numel, start = fragment.args
    return (start, numel) if isinstance(start, int) and isinstance(numel, int) and numel else None


def _is_in_order(some: Sequence[object], order: Sequence[str]) -> bool:
    """Whether `some` names come in the order of `order`."""
    place: Mapping[object, int] = {name: at for at, name in enumerate(order)}
    places = [place[name] for name in some if name in place]
    return all(before < after for before, after in pairwise(places))
