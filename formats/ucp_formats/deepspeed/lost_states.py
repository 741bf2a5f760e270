"""Parameters whose optimizer states were lost, beside others that have theirs.

A parameter that was never stepped has no states in the files of torch's optimizers, and zeros in a flat buffer are just
what its states are. One that took steps and whose states were lost looks the same, but zeros are wrong for it, with the
step count of the others beside them all the more. Two things tell: the reader says so in `Index.dropped`, naming it; or
it has a state, such as its step, and lacks others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucp.atom import AtomIndex
from ucp.errors import MissingStateError, listed
from ucp.state import WEIGHT
from ucp_formats.deepspeed.optimizer_groups import Group
from ucp_formats.deepspeed.run_facts import RunFacts

__all__ = ["check_stepped", "filled_with_zeros"]


def check_stepped(facts: RunFacts, groups: Sequence[Group], *, flat: bool = True) -> None:
    """Raise MissingStateError for parameters that took steps and lack states, unless they are to be zero.

    `flat`: what is lacking would be zeros; at stage 0 a note tells that the optimizer fails without some of its states.
    """
    if facts.keeps_zeros or not any(group.state_names for group in groups):
        return
    bare = {atom.name for group in groups for atom in group.params if atom.states.keys() == {WEIGHT}}
    reasons = facts.index.reasons(bare)
    partly = [line for group in groups for atom in group.params if (line := _lacking(group, atom))] if flat else []
    if not reasons and not partly:
        return
    told = [*reasons, *([listed(partly)] if partly else [])]
    raise MissingStateError(
        "expected the optimizer states of every parameter that took steps, as others have theirs; "
        f"{facts.index.path} lacks some:\n" + "\n".join(told) + "\nAdam without them goes on with moments of zero "
        "under a step count that says otherwise. Take the weights alone (--include '*/weight'), and the optimizer "
        "starts anew; or, if zeros will do, --zero-moments keep"
    )


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
