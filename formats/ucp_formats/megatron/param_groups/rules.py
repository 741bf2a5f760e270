"""Which parameters are in which optimizer group: names are not recorded, what sets groups apart is.

`group_settings` says what a parameter's group has to look like; here the groups that were saved are compared with that.
Learning rates decide only where flags leave several groups: a run resumed with other rates keeps those of its first
groups. (megatron-core core/optimizer/__init__.py: _get_param_groups.)
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ucp.core.index import Loss, ParamGroup
from ucp.core.names import STEP
from ucp.errors import counted
from ucp_formats.megatron.param_groups.settings import USUAL, Expected, GroupRule, is_expert

__all__ = [
    "SavedGroup",
    "agreed_step",
    "dealt_out",
    "expert_numbers",
    "inferred",
    "is_expert",
    "left_open",
    "lost_members",
    "rank_free",
]

_EXPERT = re.compile(r"(?P<layer>.+\.local_experts)\.(?P<number>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """A parameter group as it was saved: without the names of its parameters."""

    chain: int | None
    """Which of several optimizers it belongs to."""
    hyper: Mapping[str, object]
    """Its hyper-parameters."""

    @property
    def decays(self) -> bool | None:
        """Whether its parameters are decayed; None when it does not say."""
        scale = self.hyper.get("wd_mult")
        if not isinstance(scale, int | float):
            scale = self.hyper.get("weight_decay")
        return bool(scale) if isinstance(scale, int | float) else None

    def flag(self, name: str) -> bool:
        """One of its flags; false when it does not say."""
        return bool(self.hyper.get(name, False))


def expert_numbers(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Parameter of an expert to the number of the expert, and how many experts its layer has.

    >>> expert_numbers(["mlp.experts.local_experts.0.w", "mlp.experts.local_experts.1.w", "router"])
    {'mlp.experts.local_experts.0.w': (0, 2), 'mlp.experts.local_experts.1.w': (1, 2)}
    """
    matches = {name: match for name in names if (match := _EXPERT.fullmatch(name)) is not None}
    counts: dict[tuple[str, str], int] = {}
    for match in matches.values():
        layer = match["layer"], match["rest"]
        counts[layer] = max(counts.get(layer, 0), int(match["number"]) + 1)
    return {name: (int(match["number"]), counts[match["layer"], match["rest"]]) for name, match in matches.items()}


def dealt_out(
    groups: Sequence[SavedGroup],
    shapes: Mapping[str, tuple[int, ...]],
    chains: Mapping[str, int | None],
    rule: GroupRule = USUAL,
) -> tuple[tuple[ParamGroup, ...], list[str]]:
    """The groups with the names of their parameters, and the parameters that the rule puts in none, or in several.

    Groups that say the same are one: the first of them takes the parameters.

    `shapes`: trained parameter to its shape, in the order of registration. `chains`: which of several optimizers a
    parameter belongs to, where that is known. `rule`: of the run.
    """
    members: list[list[str]] = [[] for _ in groups]
    left = []
    for name, shape in shapes.items():
        fits = range(len(groups)) if len(groups) == 1 else _fitting(groups, rule.expected(name, shape))
        if name in chains and len(groups) > 1:
            fits = [number for number in fits if groups[number].chain == chains[name]]
        if fits and all(groups[number].hyper == groups[fits[0]].hyper for number in fits):
            members[fits[0]].append(name)
        else:
            left.append(name)
    made = (ParamGroup(params=tuple(own), hyper=dict(group.hyper)) for group, own in zip(groups, members, strict=True))
    return tuple(made), left


def agreed_step(groups: Iterable[SavedGroup]) -> object:
    """The step that all groups record, of those that record one; None where they differ, or where none does."""
    found = [group.hyper[STEP] for group in groups if group.hyper.get(STEP) is not None]
    return found[0] if found and all(type(own) is type(found[0]) and own == found[0] for own in found) else None


def inferred(rule: GroupRule) -> str:
    """How parameters came into their groups, for the user."""
    return (
        "which parameters are in which optimizer group is not recorded: taken from Megatron's rule and the arguments "
        f"({rule.told()}); a no_weight_decay_cond or config_overrides of the run's own would not show"
    )


def left_open(rule: GroupRule, left: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is not known of the groups of parameters `left`, as an entry of `Index.dropped`; nothing for none."""
    if not left:
        return []
    lines = "\n".join(f"  {name}: {list(shapes[name])}" for name in left)
    return [f"{_why_open(rule, left)}\n{lines}"]


def lost_members(rule: GroupRule, left: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Loss]:
    """The same for `Index.lost`: each of `left`, and why its group is not known."""
    why = _why_open(rule, left)
    return {name: Loss(why=why, detail=str(list(shapes[name]))) for name in left}


def _why_open(rule: GroupRule, left: Sequence[str]) -> str:
    return (
        f"the optimizer group of {counted(len(left), 'parameter')}, which is not recorded: {rule.open()}. Megatron "
        "records it with --ckpt-format torch and without --use-distributed-optimizer: save the run so"
    )


def _fitting(groups: Sequence[SavedGroup], expected: Expected) -> Sequence[int]:
    """Numbers of the groups that a parameter may be in."""
    fits = [number for number, group in enumerate(groups) if _fits(group, expected, groups)]
    for key, value in expected.rates.items():
        near = [number for number in fits if groups[number].hyper.get(key) == value]
        fits = near or fits
    return fits


def _fits(group: SavedGroup, expected: Expected, groups: Sequence[SavedGroup]) -> bool:
    told = expected.decays is not None and group.decays is not None
    if told and group.decays != expected.decays and any(other.decays != group.decays for other in groups):
        return False
    for key, value in expected.flags.items():
        if any(other.flag(key) for other in groups) and group.flag(key) != value:
            return False
    default = [other.hyper.get("default_config") for other in groups]
    if expected.default_rate is None or None in default or len(set(map(bool, default))) == 1:
        return True
    return bool(group.hyper["default_config"]) == expected.default_rate


def rank_free(group: ParamGroup, counted: Container[str]) -> ParamGroup:
    """A group without what belongs to the layout of the run or to the states of its parameters.

    `is_expert_parallel` is true only where experts are spread over ranks. The step is a state of every parameter;
    `counted`: names of those that have it.
    """
    belongs = {"is_expert_parallel"}
    if all(name in counted for name in group.params):
        belongs.add(STEP)
    return replace(group, hyper={key: value for key, value in group.hyper.items() if key not in belongs})
