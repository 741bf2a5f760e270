"""How many steps an optimizer has counted, for sources that record no step of the run."""

from __future__ import annotations

from ucp.core.index import Index
from ucp.core.names import STEP
from ucp.io.elements import viewed
from ucp.transfer.probe import Prober

__all__ = ["shared_step", "step_counts"]


def step_counts(index: Index) -> list[float]:
    """The different values that the parameters' `step` states have, in increasing order."""
    counts: set[float] = set()
    with Prober() as prober:
        for atom in index.atoms.values():
            state = atom.states.get(STEP)
            if state is not None and state.numel == 1:
                ref = state.fragments[0].ref
                counts.add(float(viewed(memoryview(prober.window(ref, 0, 1)), ref.dtype)[0]))
    return sorted(counts)


def shared_step(index: Index) -> int | None:
    """The one whole number that the optimizer counts for every parameter; None where there is none."""
    counts = step_counts(index)
    return int(counts[0]) if len(counts) == 1 and counts[0].is_integer() else None
