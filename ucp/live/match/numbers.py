"""A saved optimizer that numbers its parameters: a live one of the same groups says which is which.

torch loads such a state by position, so that the live optimizer has to be made as the saved one was. Where the order
of the model says otherwise, and both fit, nothing tells which of the two scripts changed its order: that is refused.
"""

from __future__ import annotations

from dataclasses import replace

from ucp.contract.protocols import ParamOrder
from ucp.core.index import Index
from ucp.errors import LoadError, UsageError
from ucp.live.adapters import LiveRun
from ucp.live.run.asked import LoadAsked
from ucp.live.run.ranks import Ranks, together
from ucp.source.read import index_of

__all__ = ["in_live_order"]


def in_live_order(index: Index, run: LiveRun, asked: LoadAsked, ranks: Ranks) -> Index:
    """`index`, with the states of its optimizer named by the order of the live one, where they need it and it fits.

    Collective. Raises LoadError where both that order and the one inferred fit, and differ.
    """
    if not index.is_numbered or asked.names.source.param_order is not None or run.optimizer is None:
        return index
    order = _order_of(run, asked)
    if any(other != order for other in ranks.share(order)):
        return index  # ranks step parameters of their own: no number means the same on all
    live = together(ranks, lambda: _read(order, asked))
    if live is None or index.unnamed is not None:
        return live or index
    if [group.params for group in live.groups] == [group.params for group in index.groups]:
        return index
    name, other = next(
        pair
        for ours, theirs in zip(index.groups, live.groups, strict=True)
        for pair in zip(ours.params, theirs.params, strict=True)
        if pair[0] != pair[1]
    )
    raise LoadError(
        f"{index.path}: the optimizer numbers its parameters, and two orders fit: that of the model, in which the "
        f"states of one are of {name}, and that of the optimizer that is loaded into, in which they are of {other}. "
        "Say which holds: param_order=[[names of each group], ...]"
    )


def _order_of(run: LiveRun, asked: LoadAsked) -> ParamOrder:
    """Parameters of each group of the live optimizer, by the names of the checkpoint."""
    rename = asked.options.rename
    groups = [] if run.optimizer is None else run.optimizer.groups()
    return tuple(tuple(rename(name) if rename else name for name in group.params) for group in groups)


def _read(order: ParamOrder, asked: LoadAsked) -> Index | None:
    """The checkpoint with that order; None where it does not fit."""
    try:
        return index_of(asked.path, source=replace(asked.names.source.without_family(), param_order=order))
    except UsageError:
        return None
