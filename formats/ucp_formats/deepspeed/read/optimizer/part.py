"""What a reader of optimizer files gives, whatever the stage; and what all of them do with parameter groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ucp.contract.scalars import scalar_state
from ucp.core.index import Extra, Loss, ParamGroup
from ucp.core.names import STEP
from ucp.core.union import State
from ucp.errors import listed

__all__ = ["OptimizerPart"]

_UNPLACED = "states of the optimizer that cannot be given to single parameters are kept as extras (optimizer_state/...)"


@dataclass(slots=True, kw_only=True)
class OptimizerPart:
    """The optimizer's view of a checkpoint."""

    states: dict[str, dict[str, State]] = field(default_factory=dict)
    """Trained parameter to state name to its pieces; `weight` where there is a master."""
    groups: list[ParamGroup] = field(default_factory=list)
    """Parameter groups."""
    extras: list[Extra] = field(default_factory=list)
    """What is no state of a parameter."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""
    dropped: list[str] = field(default_factory=list)
    """What was left out, and why."""
    lost: dict[str, Loss] = field(default_factory=dict)
    """Parameters that lack states which cannot be given to single parameters."""

    def lose(self, params: Iterable[str], unplaced: Sequence[str]) -> None:
        """Tell of states of `params` that are kept as extras; `unplaced`: each with what it is."""
        loss = Loss(why=f"{_UNPLACED}:\n{listed(unplaced)}\nthey are of")
        self.lost |= dict.fromkeys(params, loss)
        self.notes.append(f"{_UNPLACED}; what needs the optimizer's states cannot be written:\n{listed(unplaced)}")

    def take_group_steps(self) -> None:
        """Give a `step` that stands in a group only to its parameters (apex and early FusedAdam keep it there).

        A group whose parameters have a step of their own keeps its stale one among the hyper-parameters only.
        """
        for number, group in enumerate(self.groups):
            stepped = [name for name in group.params if self.states.get(name, {}).keys() - {"weight"}]
            has_own = any(STEP in self.states[name] for name in stepped)
            state = scalar_state(group.hyper.get(STEP))
            if state is None or has_own or not stepped:
                continue
            for name in stepped:
                self.states[name][STEP] = state
            self.notes.append(f"step of group {number} is taken from the parameter group: the states have none")
