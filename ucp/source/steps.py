"""One step count for all parameters, if theirs differ: in a chain, parameters are from different iterations.

DeepSpeed and Megatron keep one count for a whole optimizer group. Adam divides its moments by 1 - beta^step, so a count
that is too high by d makes the next updates of a parameter smaller by less than beta^(step - d).

    error    keep the counts; a target that stores one for all parameters refuses them (the default)
    newest   the largest count for every parameter
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from ucp.contract.optimizer import OptimizerPlan
from ucp.core.index import STEP, Index
from ucp.errors import format_count
from ucp.transfer.probe import Prober


class StepPolicy(StrEnum):
    """What to do about step counts that differ."""

    ERROR = "error"
    """Leave them to the target."""
    NEWEST = "newest"
    """Take the largest for all."""


def unify_steps(index: Index, policy: StepPolicy) -> Index:
    """`index` with one step count, as `policy` says, and a note. Raises SourceError."""
    if policy is StepPolicy.ERROR:
        return index
    with Prober() as prober:
        plan = OptimizerPlan(index, prober)
    counts = {name: count for name in index.atoms if (count := plan.count(name)) is not None}
    newest = max(counts, key=lambda name: counts[name], default="")
    older = [name for name, count in counts.items() if count != counts[newest]]
    if not older:
        return index
    atoms = dict(index.atoms)
    for name in older:
        atoms[name] = replace(atoms[name], states={**atoms[name].states, STEP: atoms[newest].states[STEP]})
    note = (
        f"the step count of {format_count(len(older), 'parameter')} was set to {counts[newest]:g} (--step newest); it "
        f"was {min(counts.values()):g} or more. Their next updates are a little smaller than they should be"
    )
    return replace(index, atoms=atoms, notes=(*index.notes, note))
