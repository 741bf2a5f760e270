"""Moments that do not have the shape of their parameter: of another model, or in a form that no target knows."""

from __future__ import annotations

from collections.abc import Iterator

from ucp.core.index import Doubt, DoubtKind, Index
from ucp.errors import counted, listed

__all__ = ["odd_moments"]

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""States that torch's optimizers keep in the shape of the parameter."""


def odd_moments(index: Index) -> Iterator[Doubt]:
    """A doubt that lists them, where there are any."""
    odd = [
        f"{atom.name}: {name} of {list(state.global_shape)}, the parameter of {list(atom.global_shape)}"
        for atom, name, state in index.states()
        if name in _MOMENTS and state.global_shape != atom.global_shape
    ]
    if odd:
        text = (
            f"expected moments in the shapes of their parameters; {index.path} has {counted(len(odd), 'moment')} of "
            f"another shape:\n{listed(odd)}\nThe optimizer is of another model, or keeps moments in a form of its own "
            "(GaLore projects them). Save it again beside this model, or take the weights alone (--include "
            "'*/weight'; ucp.load_into without optimizer)"
        )
        yield Doubt(kind=DoubtKind.MOMENT_SHAPES, text=text)
