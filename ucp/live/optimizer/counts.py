"""Counts of steps where one tensor holds many parameters, and so counts once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucp.errors import LoadError, listed

if TYPE_CHECKING:
    import torch

__all__ = ["agreed_counts"]


def agreed_counts(
    members: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, frozenset[str]], *, cure: str
) -> dict[str, torch.Tensor]:
    """Counts that the parameters of one tensor have in common, by state.

    `members`: parameter to its states; `counts`: which of them are counts; `cure`: what to do where they differ. Raises
    LoadError.
    """
    told: dict[str, dict[float, str]] = {}
    for name, own in members.items():
        for state in counts.get(name, ()):
            told.setdefault(state, {}).setdefault(float(own[state].item()), name)
    differing = [
        ", ".join(f"{value:g} of {name}" for value, name in values.items()) + f" ({state})"
        for state, values in told.items()
        if len(values) > 1
    ]
    if differing:
        raise LoadError(
            "expected one count of steps for all parameters that lie in one flat tensor; the checkpoint has\n"
            f"{listed(differing)}\n{cure}"
        )
    return {state: members[next(iter(values.values()))][state] for state, values in told.items()}
