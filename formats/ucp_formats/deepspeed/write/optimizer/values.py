"""Pieces that the optimizer files of all stages are made of: counts, parameter groups, loss scale."""

from __future__ import annotations

from collections.abc import Iterable

from ucp.core.dtypes import DType
from ucp.core.index import AtomIndex
from ucp.core.names import STEP
from ucp_formats.deepspeed.config import Precision
from ucp_formats.deepspeed.write.draft import AtomDraft
from ucp_formats.deepspeed.write.optimizer.groups import Group, inline_number
from ucp_formats.deepspeed.write.optimizer.loss_scale import plain_scaler, read_loss_scale, scaler_object
from ucp_formats.deepspeed.write.optimizer.step_forms import StepForm
from ucp_formats.deepspeed.write.run import RunFacts

__all__ = ["clipping", "common_keys", "count_of", "group_entry", "is_whole", "scalar_value"]


def scalar_value(draft: AtomDraft, group: Group, state: str, params: Iterable[str] | None = None) -> object:
    """The count that `params` share: a Python number or a 0-d tensor of this file, as found or as `group` has it."""
    found = group.scalar(state, params)
    return count_of(draft, next(atom for atom in group.params if atom.name == found.param), state, group.steps)


def count_of(draft: AtomDraft, atom: AtomIndex, state: str, steps: StepForm) -> object:
    """A count of one parameter; `steps`: the form, if it is its steps."""
    number = inline_number(atom, state)
    form = steps if state == STEP else StepForm.FOUND
    if form is StepForm.FLOATING:
        return draft.whole(atom.name, state, DType.FLOAT32)
    if number is None:
        return draft.whole(atom.name, state, atom.states[state].dtype)
    return int(number) if form is StepForm.NUMBER and is_whole(number) else number


def is_whole(number: float) -> bool:
    """Whether a count can be written as a whole number; NaN and the infinities cannot."""
    return float(number).is_integer()


def group_entry(draft: AtomDraft, group: Group, numbers: Iterable[int]) -> dict[object, object]:
    """A parameter group of a torch optimizer; `numbers`: of its parameters."""
    hyper = draft.carried(dict(group.hyper))
    assert isinstance(hyper, dict)
    # Adam of torch and of Megatron always corrects; FusedAdam and DeepSpeedCPUAdam look the key up in every step.
    is_foreign_adam = group.from_elsewhere and {"betas", "eps"} <= hyper.keys()
    own = {"bias_correction": True, **hyper} if is_foreign_adam else hyper
    return {**own, "params": list(numbers)}


def common_keys(facts: RunFacts, rank: int) -> dict[str, object]:
    """Loss scale and overflow, as stages 1 to 3 keep them."""
    precision = facts.precision
    saved = facts.extras.get("loss_scaler", rank)
    scale = read_loss_scale(saved, facts.config) if precision is Precision.FP16 else None
    return {
        "loss_scaler": plain_scaler() if scale is None else scaler_object(scale, facts.config),
        "dynamic_loss_scale": scale is not None and scale.dynamic,
        "overflow": bool(facts.extras.mapping("optimizer", rank).get("overflow", False)),
    }


def clipping(facts: RunFacts, rank: int) -> dict[str, object]:
    """Norm at which gradients are clipped; an engine keeps its own where the source does not say."""
    found = facts.extras.mapping("optimizer", rank).get("clip_grad", facts.config.gradient_clipping)
    return {} if found is None else {"clip_grad": found}
