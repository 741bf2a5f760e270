"""The state of a learning rate scheduler in a checkpoint, for a live scheduler of the same class.

A state does not say which class it is of: it is of the class whose own state has the same entries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

from ucp.contract.registry import run_extras
from ucp.contract.run_extras import (
    LR_SCHEDULER,
    LossScale,
    SchedulerState,
    find_schedulers,
    find_schedulers_in,
    parse_torch_scaler,
)
from ucp.core.index import Extra, Index
from ucp.errors import UsageError
from ucp.live.match.findings import Findings
from ucp.live.resume.values import list_inert_classes


@runtime_checkable
class Stateful(Protocol):
    """What is restored by its state: schedulers and scalers of any framework."""

    def state_dict(self) -> dict[str, object]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take a state."""


_COMPANION = re.compile(r"companion/(scheduler(_\d+)?\.(pt|bin)|meta\.pt)")
"""Files of the Trainer, accelerate and Lightning, the last of which holds it under a name.

Examples: companion/scheduler.pt, companion/scheduler_1.bin, companion/meta.pt.
"""
_CALLED = (LR_SCHEDULER, "lr_schedulers", "scheduler")
"""Names of extras that are taken for schedulers, whatever entries they have: of classes that frameworks do not have."""
_PART = "_schedulers"
"""Entry of a scheduler that is made of others."""


def find_scheduler_state(
    index: Index, scheduler: object, read: Callable[[Extra], object], findings: Findings, *, key: str | None = None
) -> SchedulerState | None:
    """The state in the checkpoint that fits the scheduler; None, with a problem, where none or several do.

    `key`: the one that the user chose. Raises UsageError for what is no scheduler.
    """
    if not isinstance(scheduler, Stateful):
        raise UsageError(f"expected a scheduler with state_dict and load_state_dict; got {type(scheduler).__name__}")
    live = scheduler.state_dict()
    saved = {own.key: own for own in _saved_states(index, read)}
    if key is not None:
        saved = {own: state for own, state in saved.items() if own == key.replace("/", ".")}
    reasons = {name: "; ".join(_misfits(live, own.state)) for name, own in saved.items()}
    fitting = {repr(saved[name].state): name for name, reason in reasons.items() if not reason}
    if len(fitting) == 1:
        (name,) = fitting.values()
        return saved[name]
    names = dict.fromkeys(extra.name for extra in index.extras)
    why = f"the checkpoint holds the state of none{f' under {key}' if key else ''}"
    why += f"; it holds {', '.join(names) or 'no extras'}"
    if fitting:
        why = f"several states fit it: {', '.join(fitting.values())}. Choose one with settings={{'scheduler': KEY}}"
    elif reasons:
        why = ", ".join(f"{name} is of another one ({reason})" for name, reason in reasons.items())
    findings.problems.append(f"scheduler {type(scheduler).__name__}: {why}")
    return None


def _saved_states(index: Index, read: Callable[[Extra], object]) -> Iterator[SchedulerState]:
    """Every state of a scheduler in the checkpoint and in the files beside it, with its tensors read."""
    known = find_schedulers(index)
    for own in known:
        state = read(Extra(name=own.key, value=own.state))
        yield replace(own, state=cast("dict[str, object]", state))
    seen = {own.extra for own in known}
    called = {*_CALLED, run_extras(index).scheduler}
    for extra in index.extras:
        if extra.rank is None and extra.name not in seen and (extra.name in called or _COMPANION.fullmatch(extra.name)):
            value = read(extra)
            states = list(find_schedulers_in(extra.name, value))
            if not states and isinstance(value, dict) and all(isinstance(entry, str) for entry in value):
                states = [SchedulerState(extra=extra.name, path=(), state=value)]
            yield from states


def _misfits(live: Mapping[str, object], saved: Mapping[str, object]) -> Iterator[str]:
    """Why a state is none of the scheduler whose own state is `live`."""
    if _entries(live) != _entries(saved):
        yield f"it kept {', '.join(_entries(saved)) or 'nothing'}; this one keeps {', '.join(_entries(live))}"
        return
    for key, own in live.items():
        other = saved.get(key, own)
        if isinstance(own, list) and isinstance(other, list) and len(own) != len(other):
            yield f"{key} is of {len(other)} groups, and the optimizer has {len(own)}"
        elif key == _PART and isinstance(own, list) and isinstance(other, list):
            for one, two in zip(own, other, strict=True):
                yield from _misfits(one, two)
    classes = list_inert_classes(dict(saved))
    if classes:
        yield f"it holds objects of {', '.join(classes)}, which are not made"


def _entries(state: Iterable[str]) -> list[str]:
    """Entries that tell classes apart: those of torch's own bookkeeping come and go with its releases."""
    return sorted(key for key in state if key == _PART or not (key.startswith("_") or key == "verbose"))


_FIELDS = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
    "growth_tracker": "growth_tracker",
}
"""Entry of the state of a scaler (torch's, Megatron's) to the number that it is."""
_SCALER_FILE = "companion/scaler.pt"
"""File of the Trainer and of accelerate."""


def make_scaler_state(
    index: Index, scaler: object, read: Callable[[Extra], object], findings: Findings
) -> tuple[str, dict[str, object]] | None:
    """The extra that holds the scale, and the state to give to the scaler; None where there is nothing to give.

    Raises UsageError for what is no scaler.
    """
    if not isinstance(scaler, Stateful):
        raise UsageError(f"expected a scaler with state_dict and load_state_dict; got {type(scaler).__name__}")
    live = scaler.state_dict()
    if not live:
        findings.notes.append("the scaler is not enabled: nothing is restored into it")
        return None
    found = run_extras(index).scale(index) or _in_companion(index, read)
    if found is None:
        findings.problems.append("scaler: the checkpoint holds no scale of the loss that adapts itself")
        return None
    import torch

    told: dict[str, object] = {}
    for key, own in ((key, own) for key, own in _FIELDS.items() if key in live):
        value = read(Extra(name="scale", value=getattr(found, own)))  # a number, out of the tensor that it may be in
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(number, int | float):
            mine = live[key]
            told[key] = torch.full_like(mine, number) if isinstance(mine, torch.Tensor) else number
    kept = [key for key in live if key not in told]
    if kept:
        findings.notes.append(f"the scaler keeps its own {', '.join(kept)}, which the checkpoint does not say")
    return found.found_in, {**live, **told}


def _in_companion(index: Index, read: Callable[[Extra], object]) -> LossScale | None:
    for extra in index.extras:
        state = read(extra) if extra.name == _SCALER_FILE else None
        if isinstance(state, dict) and {"scale", "_growth_tracker"} <= state.keys():
            return parse_torch_scaler(extra.name, state)
    return None
