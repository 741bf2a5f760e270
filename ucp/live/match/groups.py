"""Hyper-parameters of optimizer groups: which group of a checkpoint belongs to which group of a live optimizer.

>>> saved = [ParamGroup(params=("w", "b"), hyper={"lr": 0.1, "betas": [0.9, 0.99], "step": 3})]
>>> findings = Findings()
>>> live = LiveGroup(params=("w",), hyper={"lr": 1.0, "betas": (0.9, 0.95)})
>>> match_groups([live], saved, findings=findings)
[{'lr': 0.1, 'betas': (0.9, 0.99)}]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ucp.core.index import ParamGroup
from ucp.io.pickle.fields import format_value
from ucp.live.match.items import Findings
from ucp.store.values import is_plain

_INITIAL_LR = "initial_lr"
"""Learning rate that a torch scheduler starts from; the scheduler itself puts it into the group."""
_LIVE_KEYS = frozenset({"params", "param_names", "name", "foreach", "fused", "capturable", "differentiable"})
"""Entries that are never restored: the members, and which of several equivalent implementations steps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGroup:
    """A param group of a live optimizer."""

    params: tuple[str, ...]
    """Its parameters: names in the model; names in the checkpoint once they are matched."""
    hyper: Mapping[str, object]
    """Everything else in it: plain values."""


def match_groups(
    groups: Sequence[LiveGroup], saved: Sequence[ParamGroup], *, findings: Findings
) -> list[dict[str, object]]:
    """For each live group the hyper-parameters to set; empty if the checkpoint has none.

    All parameters of a live group must come from saved groups that agree.
    """
    group_of = {name: number for number, group in enumerate(saved) for name in group.params}
    restored = []
    for number, group in enumerate(groups):
        firsts = {group_of[name]: name for name in reversed(group.params) if name in group_of}
        choices = [_select_hyper(number, group, saved[source].hyper, findings) for source in sorted(firsts)]
        selected = choices[0] if choices else {}
        if any(other != selected for other in choices[1:]):
            keys = dict.fromkeys(key for hyper in choices for key in hyper)
            differing = [key for key in keys if any(hyper.get(key) != selected.get(key) for hyper in choices)]
            sources = ", ".join(f"{name} of group {source}" for source, name in sorted(firsts.items()))
            findings.problems.append(
                f"group {number} of the optimizer holds parameters of several groups of the checkpoint ({sources}), "
                f"which differ in {', '.join(differing)}. Make the groups as they were when it was saved"
            )
            selected = {}
        restored.append(selected)
        findings.notes.extend(_describe_changes(number, group, selected))
    if not saved and groups:
        findings.notes.append("the checkpoint records no hyper-parameters: the optimizer keeps its own")
    return restored


def _select_hyper(number: int, group: LiveGroup, hyper: Mapping[str, object], findings: Findings) -> dict[str, object]:
    selected: dict[str, object] = {}
    unknown = []
    for key, value in hyper.items():
        if key == _INITIAL_LR or (key in group.hyper and key not in _LIVE_KEYS):
            try:
                selected[key] = _convert(value, group.hyper.get(key))
            except TypeError as error:
                findings.problems.append(f"group {number} of the optimizer: {key}: {error}")
        elif key not in _LIVE_KEYS:
            unknown.append(f"{key}={format_value(value)}")
    note = f"group {number}: not restored, as the optimizer has no such setting: {', '.join(unknown)}"
    if unknown and note not in findings.notes:
        findings.notes.append(note)
    return selected


def _convert(stored: object, live: object) -> object:
    """`stored`, as the kind of sequence that `live` is. Raises TypeError if one cannot replace the other."""
    match live, stored:
        case None, _ if is_plain(stored):
            return stored
        case _, None:
            return None
        case ((tuple() | list()), (tuple() | list())) if len(live) == len(stored):
            return type(live)(_convert(item, current) for item, current in zip(stored, live, strict=True))
        case ((int() | float()), (int() | float())) | (str(), str()):
            return stored
    raise TypeError(f"expected a value like {live!r}; got {format_value(stored)}")


def _describe_changes(number: int, group: LiveGroup, restored: Mapping[str, object]) -> Iterator[str]:
    live = group.hyper
    changed = [f"{key}={value!r} (was {live.get(key)!r})" for key, value in restored.items() if live.get(key) != value]
    if changed:
        yield f"group {number}: restored {', '.join(changed)}"
    base = live.get(_INITIAL_LR)
    if "lr" in restored and _INITIAL_LR not in restored and base not in (None, restored["lr"]):
        yield (
            f"group {number} keeps {_INITIAL_LR}={base!r}, as the checkpoint has none: a scheduler whose state is not "
            f"restored starts from it, not from lr={restored['lr']!r}. Make the scheduler after the load"
        )
