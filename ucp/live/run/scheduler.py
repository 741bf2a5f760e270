"""The state of a learning rate scheduler in a checkpoint, for a live scheduler of the same class.

A state does not say which class it is of: it is of the class whose own state has the same entries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from ucp.contract.registry import run_extras
from ucp.core.index import Extra, Index
from ucp.errors import UsageError
from ucp.live.match.findings import Findings
from ucp.live.run.values import inert_classes

__all__ = ["Stateful", "scheduler_state"]


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
_PART = "_schedulers"
"""Entry of a scheduler that is made of others."""


def scheduler_state(
    index: Index, scheduler: object, read: Callable[[Extra], object], findings: Findings
) -> tuple[str, dict[str, object]] | None:
    """The extra that fits the scheduler, and its state; None, with a problem, where none or several do.

    Raises UsageError for what is no scheduler.
    """
    if not isinstance(scheduler, Stateful):
        raise UsageError(f"expected a scheduler with state_dict and load_state_dict; got {type(scheduler).__name__}")
    live = scheduler.state_dict()
    named = run_extras(index).schedulers
    held = [own for own in index.extras if own.rank is None and (own.name in named or _COMPANION.fullmatch(own.name))]
    saved = {extra.name: state for extra in held if (state := _state(read(extra), named)) is not None}
    reasons = {name: "; ".join(_misfits(live, state)) for name, state in saved.items()}
    fitting = {repr(saved[name]): name for name, reason in reasons.items() if not reason}
    if len(fitting) == 1:
        (name,) = fitting.values()
        return name, saved[name]
    why = "the checkpoint holds the state of none"
    if fitting:
        why = (
            f"several states fit it: {', '.join(fitting.values())}. Load the right one with ucp.open(path).extra(NAME)"
        )
    elif reasons:
        why = ", ".join(f"{name} is of another one ({reason})" for name, reason in reasons.items())
    findings.problems.append(f"scheduler {type(scheduler).__name__}: {why}")
    return None


def _state(value: object, named: Sequence[str]) -> dict[str, object] | None:
    if isinstance(value, dict):
        value = next((value[name] for name in named if name in value), value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else None


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
    classes = inert_classes(dict(saved))
    if classes:
        yield f"it holds objects of {', '.join(classes)}, which are not made"


def _entries(state: Iterable[str]) -> list[str]:
    """Entries that tell classes apart: those of torch's own bookkeeping come and go with its releases."""
    return sorted(key for key in state if key == _PART or not (key.startswith("_") or key == "verbose"))
