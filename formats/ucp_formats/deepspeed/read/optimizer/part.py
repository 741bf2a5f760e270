"""What a reader of optimizer files gives, whatever the stage; and what all of them do with parameter groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from ucp.contract.problems import Problems
from ucp.contract.rank_extras import Checksums
from ucp.core.index import Extra, Loss, ParamGroup
from ucp.core.names import STEP
from ucp.errors import listed
from ucp.io.pickle.fields import mapping, sequence, text
from ucp_formats.deepspeed.read.optimizer.flat_group import BucketStates, scalar_state
from ucp_formats.deepspeed.read.optimizer.stored import State

__all__ = ["OptimizerPart", "hyper_parameters", "same_groups", "take_group_steps"]

_UNPLACED = "states of the optimizer that cannot be given to single parameters are kept as extras (optimizer_state/...)"
_EXPERTS = re.compile(r"ep_size_\d+")

States = dict[str, dict[str, State]]


@dataclass(slots=True, kw_only=True)
class OptimizerPart:
    """The optimizer's view of a checkpoint."""

    states: States = field(default_factory=dict)
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

    def add(self, found: BucketStates) -> Self:
        """Take in the states of a bucket."""
        self.states |= found.states
        self.extras += found.extras
        self.dropped += found.dropped
        if found.unplaced:
            self.lose(found.states, found.unplaced)
        return self

    def lose(self, params: Iterable[str], unplaced: Sequence[str]) -> None:
        """Tell of states of `params` that are kept as extras; `unplaced`: each with what it is."""
        loss = Loss(why=f"{_UNPLACED}:\n{listed(unplaced)}\nthey are of")
        self.lost |= dict.fromkeys(params, loss)
        self.notes.append(f"{_UNPLACED}; what needs the optimizer's states cannot be written:\n{listed(unplaced)}")


def hyper_parameters(group: object, where: str) -> dict[str, object]:
    """Everything in a parameter group but its parameters (numbers and, since torch 2.6, names), as found.

    The name that DeepSpeed gives a group of experts, `ep_size_2`, is left out: it says how many ranks they lay over.
    """
    entries = mapping(group, where)
    members = {"params", "param_names"}
    if entries.get("moe") is True and _EXPERTS.fullmatch(str(entries.get("name"))):
        members.add("name")
    return {text(key, f"a key of {where}"): value for key, value in entries.items() if key not in members}


def same_groups(groups: Mapping[str, object], checksums: Checksums, problems: Problems) -> Sequence[object]:
    """The parameter groups that all files share (file to its `param_groups`); the first file's."""
    (first, usual), *others = groups.items()
    for file, own in others:
        if not checksums.same(own, usual):
            problems.wrong.append(f"{file}: of another run: its param_groups differ from those in {first}")
    return sequence(usual, f"param_groups of {first}")


def take_group_steps(part: OptimizerPart) -> None:
    """Give a `step` that stands in a parameter group only to its parameters (apex and early FusedAdam keep it there).

    A group whose parameters have a step of their own keeps its stale one among the hyper-parameters only.
    """
    for number, group in enumerate(part.groups):
        step = group.hyper.get(STEP)
        stepped = [name for name in group.params if part.states.get(name, {}).keys() - {"weight"}]
        has_own = any(STEP in part.states[name] for name in stepped)
        state = scalar_state(step)
        if state is None or has_own or not stepped:
            continue
        for name in stepped:
            part.states[name][STEP] = state
        part.notes.append(f"step of group {number} is taken from the parameter group: the states have none")
