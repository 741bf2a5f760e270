"""Finds the step and the scheduler of a source that does not store them under the names the target's framework loads.

A torch script saves the state of its scheduler under any key, and often no step. The scheduler is recognised by its
entries (`ucp.contract.run_extras`) and written where the framework loads it from; the step is the one that the
optimizer counts for every parameter. If either is ambiguous, the user decides (`--set scheduler=KEY`, `--set step=N`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ucp.contract.optimizer import read_step_counts
from ucp.contract.protocols import Target
from ucp.contract.registry import run_extras
from ucp.contract.run_extras import LR_SCHEDULER, SchedulerState, find_schedulers
from ucp.core.index import STEP, Extra, Index
from ucp.errors import UsageError
from ucp.io.pickle.values import find_differing_values
from ucp.transfer.probe import Prober

SCHEDULER = "scheduler"
"""Setting: key of the scheduler's state in the source."""
RUN_SETTINGS = (SCHEDULER, STEP)
"""Settings of every target whose framework resumes a run."""


def place_run_state(index: Index, chosen: Target, settings: Mapping[str, str]) -> tuple[Index, Mapping[str, str]]:
    """`index` with its step and scheduler where `chosen` looks for them, and the settings that are left.

    Raises UsageError for a setting that does not fit the source.
    """
    if not chosen.resumes:
        return index, settings
    others = {name: text for name, text in settings.items() if name not in RUN_SETTINGS}
    index = _set_step(index, settings.get(STEP))
    return _find_scheduler(index, chosen, settings), others


def _set_step(index: Index, text: str | None) -> Index:
    if text is not None:
        if not (text.isascii() and text.isdecimal()):
            raise UsageError(f"expected --set {STEP} as a whole number; got {text}")
        if index.step is not None and index.step != int(text):
            raise UsageError(
                f"{index.path} says in its files or its name that its step is {index.step}: drop --set {STEP}={text}"
            )
        return replace(index, step=int(text))
    if index.step is not None:
        return index
    with Prober() as prober:
        counts = read_step_counts(index, prober)
    if not any(counts):
        return index
    if len(counts) == 1 and counts[0].is_integer():
        step = int(counts[0])
        note = f"the source records no step: {step} is taken, which the optimizer counts for every parameter"
        return replace(index, step=step, notes=(*index.notes, f"{note} (--set {STEP}=N sets another)"))
    line = (
        f"the source records no step, and the optimizer's counts for its parameters range from {counts[0]:g} to "
        f"{counts[-1]:g}: the run starts at step 0, unless --set {STEP}=N sets another"
    )
    return replace(index, dropped=(*index.dropped, line))


def _find_scheduler(index: Index, chosen: Target, settings: Mapping[str, str]) -> Index:
    """`index` with the scheduler's state as `LR_SCHEDULER`; a line under `dropped` where several could be it."""
    key, place = settings.get(SCHEDULER), chosen.scheduler_of(settings)
    has_one = any(extra.name == LR_SCHEDULER and isinstance(extra.value, dict) for extra in index.extras)
    has_place = has_one or run_extras(index).scheduler is not None  # it need not be searched
    if key is None and (place is None or has_place):
        return index
    if place is None:
        has_other = chosen.scheduler is not None
        why = "writes no scheduler with these settings" if has_other else "loads only schedulers of its own framework"
        raise UsageError(f"{chosen.name} {why}: drop --set {SCHEDULER}={key}")
    known = {scheduler.key: scheduler for scheduler in find_schedulers(index)}
    if key is not None and key.replace("/", ".") not in known:
        raise UsageError(
            f"expected the key of a scheduler's state in {index.path} (--set {SCHEDULER}=KEY); got {key}. It has "
            f"{', '.join(known) or 'none'}"
        )
    wanted = known.values() if key is None else [known[key.replace("/", ".")]]
    different: list[SchedulerState] = []
    for scheduler in wanted:
        if all(any(True for _ in find_differing_values(scheduler.state, other.state)) for other in different):
            different.append(scheduler)
    if len(different) > 1:
        line = (
            f"schedulers {', '.join(known)}: none is written as {place}, as nothing says which of them the "
            f"run uses. Choose one with --set {SCHEDULER}=KEY"
        )
        return replace(index, dropped=(*index.dropped, line))
    keeps = (index.origin or index.format) in chosen.keeps_extras_of
    return _move_scheduler(index, different[0], place, keeps=keeps) if different else index


def _move_scheduler(index: Index, scheduler: SchedulerState, place: str, *, keeps: bool) -> Index:
    """`index` with a scheduler's state as the extra `place`, which the target writes.

    If the target `keeps` the extras of the source, the state stays in its old place, too, for the user's script.
    """
    if scheduler.key == place:
        return index
    extras: list[Extra] = [Extra(name=place, value=scheduler.state)]
    for extra in index.extras:
        rest = scheduler.remove_from(extra) if extra.name == scheduler.extra and not keeps else extra
        if rest is not None and rest.name != place:
            extras.append(rest)
    note = f"the scheduler's state is taken from {scheduler.key}, as {place}"
    return replace(index, extras=tuple(extras), notes=(*index.notes, note))
