"""Find the saved state of a learning rate scheduler or loss scaler for a live one.

A saved state does not name its class: it fits a scheduler whose own state has the same entries.
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
from ucp.errors import UsageError, format_count
from ucp.live.match.items import Findings
from ucp.live.resume.values import list_inert_classes


@runtime_checkable
class Stateful(Protocol):
    """An object with a state to restore: a scheduler or scaler of any framework."""

    def state_dict(self) -> dict[str, object]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Set its state."""


_SCHEDULER_FILE = re.compile(r"companion/(scheduler(_\d+)?\.(pt|bin)|meta\.pt)")
"""Files of the Trainer, accelerate and Lightning, whose meta.pt holds the state under a key.

Examples: companion/scheduler.pt, companion/scheduler_1.bin, companion/meta.pt.
"""
_SCHEDULER_EXTRAS = (LR_SCHEDULER, "lr_schedulers", "scheduler")
"""Names of extras that are schedulers, whatever their entries: those of a user's own class too."""
_INNER = "_schedulers"
"""Entry of a scheduler that consists of others."""


def find_scheduler_state(
    index: Index, scheduler: object, read: Callable[[Extra], object], findings: Findings, *, key: str | None = None
) -> SchedulerState | None:
    """The state in the checkpoint that fits the scheduler; None, with a problem, if none or several do.

    `key`: key of the state that the user chose. Raises UsageError if `scheduler` is not a scheduler.
    """
    if not isinstance(scheduler, Stateful):
        raise UsageError(f"expected a scheduler with state_dict and load_state_dict; got {type(scheduler).__name__}")
    live = scheduler.state_dict()
    saved = {state.key: state for state in _read_states(index, read)}
    if key is not None:
        saved = {name: state for name, state in saved.items() if name == key.replace("/", ".")}
    reasons = {name: "; ".join(_find_misfits(live, state.state)) for name, state in saved.items()}
    fitting = {repr(saved[name].state): name for name, reason in reasons.items() if not reason}
    if len(fitting) == 1:
        return saved[fitting.popitem()[1]]
    names = dict.fromkeys(extra.name for extra in index.extras)
    why = f"the checkpoint has no state of a scheduler{f' under {key}' if key else ''}"
    why += f"; its extras are {', '.join(names) or 'none'}"
    if fitting:
        why = f"several states fit it: {', '.join(fitting.values())}. Choose one with settings={{'scheduler': KEY}}"
    elif reasons:
        why = ", ".join(f"{name} is the state of another scheduler ({reason})" for name, reason in reasons.items())
        why += (
            ". Load without scheduler=, and step this one report.step times (in ucp.integrations: schedule='advance')"
        )
    findings.problems.append(f"scheduler {type(scheduler).__name__}: {why}")
    return None


def _read_states(index: Index, read: Callable[[Extra], object]) -> Iterator[SchedulerState]:
    """Every state of a scheduler in the checkpoint and in its companion files, with its tensors read."""
    known = find_schedulers(index)
    for saved in known:
        state = read(Extra(name=saved.key, value=saved.state))
        yield replace(saved, state=cast("dict[str, object]", state))
    seen = {saved.extra for saved in known}
    names = {*_SCHEDULER_EXTRAS, run_extras(index).scheduler}
    for extra in index.extras:
        is_scheduler = extra.name in names or _SCHEDULER_FILE.fullmatch(extra.name)
        if extra.rank is None and extra.name not in seen and is_scheduler:
            value = read(extra)
            states = list(find_schedulers_in(extra.name, value))
            if not states and isinstance(value, dict) and all(isinstance(entry, str) for entry in value):
                states = [SchedulerState(extra=extra.name, path=(), state=value)]
            yield from states


def _find_misfits(live: Mapping[str, object], saved: Mapping[str, object]) -> Iterator[str]:
    """Why `saved` is not a state of the scheduler whose state is `live`."""
    if _list_entries(live) != _list_entries(saved):
        entries = ", ".join(_list_entries(saved)) or "nothing"
        yield f"it kept {entries}; this one keeps {', '.join(_list_entries(live))}"
        return
    for key, value in live.items():
        other = saved.get(key, value)
        if isinstance(value, list) and isinstance(other, list) and len(value) != len(other):
            yield f"{key} has {format_count(len(other), 'entry', 'entries')}, and that of this scheduler {len(value)}"
        elif key == _INNER and isinstance(value, list) and isinstance(other, list):
            for inner, saved_inner in zip(value, other, strict=True):
                yield from _find_misfits(inner, saved_inner)
    classes = list_inert_classes(dict(saved))
    if classes:
        yield f"it holds objects of {', '.join(classes)}, which are not created"


def _list_entries(state: Iterable[str]) -> list[str]:
    """Entries that tell classes apart, without internal ones of torch, which differ between its releases."""
    return sorted(key for key in state if key == _INNER or not (key.startswith("_") or key == "verbose"))


_SCALE_FIELDS = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
    "growth_tracker": "growth_tracker",
}
"""Entry of the state of a scaler (torch's, Megatron's) to the field of `LossScale`."""
_SCALER_FILE = "companion/scaler.pt"
"""File of the Trainer and of accelerate."""


def make_scaler_state(
    index: Index, scaler: object, read: Callable[[Extra], object], findings: Findings
) -> tuple[str, dict[str, object]] | None:
    """The extra that holds the loss scale, and the state to give to the scaler; None if there is nothing to give.

    Raises UsageError if `scaler` is not a scaler.
    """
    if not isinstance(scaler, Stateful):
        raise UsageError(f"expected a scaler with state_dict and load_state_dict; got {type(scaler).__name__}")
    live = scaler.state_dict()
    if not live:
        findings.notes.append("the scaler is not enabled: nothing is restored into it")
        return None
    saved = run_extras(index).scale(index) or _read_scaler_file(index, read)
    if saved is None:
        findings.problems.append("scaler: the checkpoint holds no dynamic loss scale")
        return None
    import torch

    restored: dict[str, object] = {}
    for key, name in _SCALE_FIELDS.items():
        if key not in live:
            continue
        value = read(Extra(name="scale", value=getattr(saved, name)))  # a number, or a tensor that holds it
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(number, int | float):
            current = live[key]
            restored[key] = torch.full_like(current, number) if isinstance(current, torch.Tensor) else number
    absent = [key for key in live if key not in restored]
    if absent:
        findings.notes.append(f"the scaler keeps its {', '.join(absent)}, as the checkpoint has none")
    return saved.found_in, {**live, **restored}


def _read_scaler_file(index: Index, read: Callable[[Extra], object]) -> LossScale | None:
    for extra in index.extras:
        state = read(extra) if extra.name == _SCALER_FILE else None
        if isinstance(state, dict) and {"scale", "_growth_tracker"} <= state.keys():
            return parse_torch_scaler(extra.name, state)
    return None
