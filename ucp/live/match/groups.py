"""Hyper-parameters of optimizer groups: which group of a checkpoint is which group of a live optimizer.

>>> saved = [ParamGroup(params=("w", "b"), hyper={"lr": 0.1, "betas": [0.9, 0.99], "step": 3})]
>>> findings = Findings()
>>> live = LiveGroup(params=("w",), hyper={"lr": 1.0, "betas": (0.9, 0.95)})
>>> match_groups([live], saved, findings=findings)
[{'lr': 0.1, 'betas': (0.9, 0.99)}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ucp.core.index import ParamGroup
from ucp.io.pickle.fields import shown
from ucp.live.match.findings import Findings
from ucp.store.values import is_plain

INITIAL_LR = "initial_lr"
"""Learning rate that a torch scheduler starts from; it puts it into the group itself."""

OWN = frozenset({"params", "param_names", "name", "foreach", "fused", "capturable", "differentiable"})
"""What a live group says of itself: its members, and by which of several equal programs it steps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGroup:
    """A parameter group of a live optimizer."""

    params: tuple[str, ...]
    """Its parameters, as the checkpoint calls them."""
    hyper: Mapping[str, object]
    """Everything else in it: plain values."""


def match_groups(
    groups: Sequence[LiveGroup], saved: Sequence[ParamGroup], *, findings: Findings
) -> list[dict[str, object]]:
    """For each live group the hyper-parameters to set; empty where the checkpoint does not say.

    All parameters of a live group must come from saved groups that agree.
    """
    owner = {name: number for number, group in enumerate(saved) for name in group.params}
    restored = []
    for number, group in enumerate(groups):
        firsts = {owner[name]: name for name in reversed(group.params) if name in owner}
        wanted = [_select_hyper(number, group, saved[source].hyper, findings) for source in sorted(firsts)]
        if any(one != wanted[0] for one in wanted[1:]):
            keys = dict.fromkeys(key for one in wanted for key in one)
            differing = [key for key in keys if any(one.get(key) != wanted[0].get(key) for one in wanted)]
            several = ", ".join(f"{name} of group {source}" for source, name in sorted(firsts.items()))
            findings.problems.append(
                f"group {number} of the optimizer holds {several} of the checkpoint, whose {', '.join(differing)} "
                "differ. Make the groups as they were"
            )
            wanted = []
        restored.append(wanted[0] if wanted else {})
        findings.notes.extend(_changes(number, group, restored[-1]))
    if not saved and groups:
        findings.notes.append("the checkpoint records no hyper-parameters: those of the optimizer stay")
    return restored


def _select_hyper(number: int, group: LiveGroup, hyper: Mapping[str, object], findings: Findings) -> dict[str, object]:
    selected: dict[str, object] = {}
    unknown = []
    for key, value in hyper.items():
        if key in OWN:
            continue
        if key == INITIAL_LR or key in group.hyper:
            try:
                selected[key] = _like(group.hyper.get(key), value)
            except TypeError as error:
                findings.problems.append(f"group {number} of the optimizer: {key}: {error}")
        else:
            unknown.append(f"{key}={shown(value)}")
    if unknown:
        note = f"group {number}: the optimizer has no {', '.join(unknown)}"
        findings.notes.extend([note] if note not in findings.notes else [])
    return selected


def _like(live: object, stored: object) -> object:
    """`stored`, with the kind of sequence that `live` is. Raises TypeError where one cannot stand for the other."""
    match live, stored:
        case None, _ if is_plain(stored):
            return stored
        case _, None:
            return None
        case ((tuple() | list()), (tuple() | list())) if len(live) == len(stored):
            return type(live)(_like(a, b) for a, b in zip(live, stored, strict=True))
        case ((int() | float()), (int() | float())):
            return stored
        case str(), str():
            return stored
    raise TypeError(f"expected a value like {live!r}; got {shown(stored)}")


def _changes(number: int, group: LiveGroup, restored: Mapping[str, object]) -> list[str]:
    changed = [
        f"{key} {group.hyper.get(key)!r} to {value!r}"
        for key, value in restored.items()
        if group.hyper.get(key) != value
    ]
    notes = [f"group {number}: restored {', '.join(changed)}"] if changed else []
    base = group.hyper.get(INITIAL_LR)
    if "lr" in restored and INITIAL_LR not in restored and base not in (None, restored["lr"]):
        notes.append(
            f"group {number} keeps {INITIAL_LR}={base!r}, which the checkpoint does not have: a scheduler goes by it, "
            f"and not by lr={restored['lr']!r}, unless its own state is restored. Make the scheduler after the load"
        )
    return notes
