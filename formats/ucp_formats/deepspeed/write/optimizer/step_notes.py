"""What to tell of the steps that are written for a universal load: whose optimizer goes on from them, and casts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ucp.core.dtypes import DType
from ucp.core.names import STEP
from ucp.errors import UsageError, counted, listed
from ucp_formats.deepspeed.write.optimizer.groups import Group, inline_number
from ucp_formats.deepspeed.write.optimizer.step_forms import StepForm
from ucp_formats.deepspeed.write.optimizer.values import is_whole

__all__ = ["check_steps", "step_casts", "step_is_tensor", "step_notes"]

_WHOLE = (
    "step is written as a whole number, from which DeepSpeed's optimizers (FusedAdam, DeepSpeedCPUAdam) go on; torch's "
    "fail in the first step: write for them with --set optimizer=torch"
)


def check_steps(groups: Sequence[Group], wanted: StepForm) -> None:
    """Raise UsageError for steps that cannot be written in the form that was asked for."""
    kept = [group.params[0].name for group in groups if STEP in group.scalars and group.steps is not wanted]
    if kept:
        raise UsageError(
            f"expected steps that are plain numbers, to write each as a {wanted}; the source has tensors of its own, "
            f"in the groups of\n{listed(kept)}\nDrop --set optimizer, and change optimizer.state[p]['step'] of every p "
            "after the load: int(step) for an optimizer of DeepSpeed, torch.tensor(float(step)) for one of torch"
        )


def step_is_tensor(group: Group) -> bool:
    """Whether a universal checkpoint has the steps of a group as tensors."""
    if group.steps is StepForm.FLOATING:
        return True
    return group.scalar(STEP).number is None


def step_notes(groups: Sequence[Group]) -> Iterator[str]:
    """Whose optimizer counts on from the steps after a universal load, where they are not as an engine saved them."""
    if any(group.steps is StepForm.NUMBER for group in groups if STEP in group.scalars):
        yield _WHOLE


def step_casts(groups: Sequence[Group]) -> Iterator[str]:
    """One line per change of type of steps that become plain numbers."""
    changed: dict[DType, int] = {}
    for group in groups:
        if group.steps is not StepForm.NUMBER:
            continue
        for atom in group.params:
            number = inline_number(atom, STEP) if STEP in atom.states else None
            if isinstance(number, float) and is_whole(number):
                changed[atom.states[STEP].dtype] = changed.get(atom.states[STEP].dtype, 0) + 1
    yield from (
        f"{STEP}: {old} -> {DType.INT64}, a whole number, in {counted(n, 'parameter')}" for old, n in changed.items()
    )
