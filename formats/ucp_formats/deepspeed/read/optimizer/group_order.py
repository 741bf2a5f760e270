"""The order of parameters in the buffers of ZeRO-1/2, and that of the optimizer.

`param_shapes` is in the order of the buffer, always. The optimizer's own order differs from it under
`round_robin_gradients`, which deals the parameters out to the ranks like cards. `param_slice_mappings` follows the
optimizer's order, and up to 0.19.8 gives wrong offsets when the two differ: it is compared, never used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from ucp_formats.deepspeed.partition import round_robin

__all__ = ["optimizer_order", "undo_round_robin"]


def optimizer_order(
    names: Sequence[str], *, ranks: int, dealt: bool, mappings: Iterable[Iterable[str]]
) -> tuple[tuple[str, ...], bool]:
    """Names of a group in the order of its optimizer, and whether they were dealt out.

    `names`: in the order of the buffer. `dealt`: whether the configuration says so. `mappings`: of each rank the names
    in `param_slice_mappings`, in the optimizer's order.
    """
    orders = {False: tuple(names), True: undo_round_robin(names, ranks=ranks)}
    recorded = [list(own) for own in mappings]
    fits = {key: _keeps_order(recorded, order) for key, order in orders.items()}
    chosen = dealt if fits[dealt] or not fits[not dealt] else not dealt
    return orders[chosen], chosen


def undo_round_robin(names: Sequence[str], *, ranks: int) -> tuple[str, ...]:
    """Order before `round_robin`.

    >>> undo_round_robin(("a", "c", "e", "b", "d"), ranks=2)
    ('a', 'b', 'c', 'd', 'e')
    """
    places = [int(place) for place in round_robin([str(at) for at in range(len(names))], ranks=ranks)]
    return tuple(name for _, name in sorted(zip(places, names, strict=True)))


def _keeps_order(recorded: Iterable[Iterable[str]], order: Sequence[str]) -> bool:
    """Whether the names of each come in the order of `order`."""
    place: Mapping[str, int] = {name: at for at, name in enumerate(order)}
    return all(a < b for own in recorded for a, b in pairwise(place[name] for name in own if name in place))
