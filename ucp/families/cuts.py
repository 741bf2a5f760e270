"""Along which dim tensor-parallel ranks cut a tensor, by the rules of a model family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucp.families.rule import DIM

if TYPE_CHECKING:
    from ucp.families.family import Family

__all__ = ["cut_dim"]


def cut_dim(family: Family, name: str) -> int | None:
    """Dim of a stored tensor that its rule cuts; None where it is whole on all ranks, in a view, or has no rule."""
    named = family.read(name)
    if named is None or named.stacked or (named.alias is not None and named.alias.view):
        return None
    axes = family.match([named.canonical])[named.canonical].rule.axes
    dim = next((axis.dim for axis in axes if axis.axis == "tp" and DIM in axis.options), None)
    order = named.alias.order if named.alias is not None else ()
    return order[dim] if order and dim is not None else dim
