"""Pieces that the optimizer files of all stages are made of: counts, parameter groups, loss scale."""

from __future__ import annotations

from collections.abc import Iterable

from ucp_formats.deepspeed.atom_draft import AtomDraft
from ucp_formats.deepspeed.loss_scaling import plain_scaler, read_loss_scale, scaler_object
from ucp_formats.deepspeed.optimizer_groups import Group
from ucp_formats.deepspeed.run_config import Precision
from ucp_formats.deepspeed.run_facts import RunFacts

__all__ = ["clipping", "common_keys", "group_entry", "scalar_value"]


def scalar_value(draft: AtomDraft, group: Group, state: str, params: Iterable[str] | None = None) -> object:
    """The count that `params` share: a Python number if it was one, else a 0-d tensor of this file."""
    found = group.scalar(state, params)
    if found.number is not None:
        return found.number
    holder = next(atom for atom in group.params if atom.name == found.param)
    return draft.whole(found.param, state, holder.states[state].dtype)


def group_entry(draft: AtomDraft, group: Group, numbers: Iterable[int]) -> dict[object, object]:
    """A parameter group of a torch optimizer; `numbers`: of its parameters."""
    hyper = draft.carried(dict(group.hyper))
    assert isinstance(hyper, dict)
    return {**hyper, "params": list(numbers)}


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
