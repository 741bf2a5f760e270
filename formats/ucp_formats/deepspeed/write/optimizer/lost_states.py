"""Parameters whose optimizer states were lost, beside others that have theirs.

A parameter that was never stepped has no states in the files of torch's optimizers, and zeros in a flat buffer are just
what its states are. One that took steps and whose states were lost looks the same, but zeros are wrong for it, with the
step count of the others beside them all the more. Two things tell: `Index.lost` has it, or it has a state, such as its
step, and lacks others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucp.core.index import AtomIndex
from ucp.core.names import WEIGHT
from ucp.errors import MissingStateError, listed
from ucp_formats.deepspeed.write.optimizer.groups import Group
from ucp_formats.deepspeed.write.run import RunFacts

__all__ = ["check_stepped", "filled_with_zeros"]


def check_stepped(facts: RunFacts, groups: Sequence[Group], *, flat: bool = True) -> None:
    """Raise MissingStateError for parameters that took steps and lack states, unless they are to be zero.

    `flat`: what is lacking would be zeros. Else each parameter has states of its own: one without any, which the user
    left out, starts anew, and a note tells that the optimizer fails without some of them.
    """
    if facts.keeps_zeros or not any(group.state_names for group in groups):
        return
    found = [(group, atom) for group in groups for atom in group.params]
    reasons = facts.index.reasons([atom.name for group, atom in found if _is_lost(facts, group, atom, flat=flat)])
    partly = [line for group, atom in found if (line := _lacking(group, atom))] if flat else []
    if not reasons and not partly:
        return
    told = [*reasons, *([listed(partly)] if partly else [])]
    raise MissingStateError(
        "expected the optimizer states of every parameter that took steps, as others have theirs; "
        f"{facts.index.path} lacks some:\n" + "\n".join(told) + "\nAdam without them goes on with moments of zero "
        "under a step count that says otherwise. Take the weights alone (--include '*/weight'), and the optimizer "
        "starts anew; or, if zeros will do, --zero-moments keep"
    )


def _is_lost(facts: RunFacts, group: Group, atom: AtomIndex, *, flat: bool) -> bool:
    """Whether the index says why a parameter lacks states that must not be zeros."""
    loss = facts.index.lost.get(atom.name)
    if loss is None:
        return False
    if loss.chosen:
        return flat and not {*group.elementwise, *group.scalars} <= atom.states.keys()
    return True


def _lacking(group: Group, atom: AtomIndex) -> str:
    """What a parameter that has some states lacks of those with a value per element; empty for nothing."""
    if atom.states.keys() == {WEIGHT}:
        return ""
    missing = [name for name in group.elementwise if name not in atom.states]
    has = [name for name in atom.states if name != WEIGHT]
    return f"{atom.name}: {', '.join(missing)}, and has {', '.join(has)}" if missing else ""


def filled_with_zeros(groups: Sequence[Group]) -> dict[str, frozenset[str]]:
    """Parameter to the states that flat groups and universal files have of it, and the source has not."""
    found = {}
    for group in groups:
        states = {*group.elementwise, *group.scalars}
        for atom in group.params:
            if missing := states - atom.states.keys():
                found[atom.name] = frozenset(missing)
    return found
