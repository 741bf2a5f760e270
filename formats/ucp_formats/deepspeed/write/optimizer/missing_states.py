"""What becomes of a checkpoint that lacks optimizer states when DeepSpeed loads it, for the user to know beforehand.

Tried with 0.19.8 (`test_deepspeed_partial.py`). An optimizer without any state starts anew: every
optimizer does so at its first step. One with some of its states trusts that the others are there, and fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ucp.core.names import STEP, WEIGHT
from ucp_formats.deepspeed.config import Precision
from ucp_formats.deepspeed.write.optimizer.groups import Group

__all__ = ["ANEW", "lacking", "native_notes", "shared_notes"]

_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
"""Moments of Adam."""

ANEW = "Leave out all states of the optimizer (--include '*/weight'), and it starts anew"
"""What to do instead."""


def native_notes(groups: Sequence[Group], *, stage: int, flat: bool, precision: Precision) -> Iterator[str]:
    """For files that `load_checkpoint` reads under ZeRO `stage`; `flat`: parameters of a group lie in one buffer."""
    yield from shared_notes(groups, "load_checkpoint")
    missing = lacking(groups, each=not flat)
    if not missing:
        return
    option = "load_module_only=True" if stage == 0 else "load_optimizer_states=False"
    rounded = "" if precision is Precision.FP32 else f", with masters rounded to {precision}"
    unlike = "; load_module_only=True would load none" if stage == 3 else ""
    yield (
        f"load_checkpoint cannot resume the optimizer, which lacks {', '.join(missing)}: it fails, or the first step "
        f"after it, with KeyError. {option} loads the weights alone{rounded}{unlike}. {ANEW}"
    )


def shared_notes(groups: Sequence[Group], loader: str) -> Iterator[str]:
    """For native and universal files; `loader`: what reads them."""
    kept = [group for group in groups if group.params]
    bare = [number for number, group in enumerate(kept) if not group.state_names]
    if not bare:
        return
    which = "the optimizer" if len(bare) == len(kept) else f"groups {', '.join(map(str, bare))} of the optimizer"
    yield (
        f"no states of {which} are there: {loader} restores weights and hyper-parameters, and an optimizer that keeps "
        "states starts them anew"
    )


def lacking(groups: Sequence[Group], *, each: bool) -> tuple[str, ...]:
    """States that are known to be missing beside others of the same optimizer.

    `each`: parameters have states of their own (stage 0, not flat), of which single ones may lack some.
    """
    missing = [name for group in groups if group.state_names for name in _of_adam(group)]
    if each:
        missing += [own for group in groups for own in _of_single_ones(group)]
    return tuple(dict.fromkeys(missing))


def _of_adam(group: Group) -> Iterator[str]:
    """States of Adam that no parameter has, where the hyper-parameters are Adam's (Lion has no eps).

    What has another state in place of the second moment, as Adamax has, is taken for complete.
    """
    if not {"betas", "eps"} <= group.hyper.keys():
        return
    others = group.elementwise.keys() - {_FIRST}
    if _FIRST not in group.elementwise:
        yield _FIRST
    if not others:
        yield _SECOND
    if STEP not in group.scalars and STEP not in group.hyper:
        yield STEP


def _of_single_ones(group: Group) -> Iterator[str]:
    """States that others of the group have and a parameter lacks, unless it has none: then it was never stepped."""
    names = group.state_names
    for atom in group.params:
        if atom.states.keys() - {WEIGHT}:
            yield from (f"{state} of {atom.name}" for state in names if state not in atom.states)
