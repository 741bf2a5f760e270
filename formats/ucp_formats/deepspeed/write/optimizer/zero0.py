"""The optimizer of stage 0, which lies inside the model-states file, in one of three shapes.

- `plain`: a torch optimizer over the model's own parameters (fp32);
- `unfused`: FP16_UnfusedOptimizer, a master per parameter (fp16 or bf16 with any optimizer but FusedAdam);
- `fused`: FP16_Optimizer, one flat master per group and no padding (fp16 or bf16 with FusedAdam).

None of them names its parameters. The names of each group stand in `param_shapes` of the model-states file, which
DeepSpeed leaves None at stage 0 and never reads; `param_names` in the groups would make torch refuse to add a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from ucp.core.index import AtomIndex, Index, Kind
from ucp.core.names import WEIGHT
from ucp.errors import UnsupportedError, listed
from ucp_formats.deepspeed.config import Precision
from ucp_formats.deepspeed.partition import shared_buffers
from ucp_formats.deepspeed.write.draft import AtomDraft, Stored
from ucp_formats.deepspeed.write.optimizer.groups import Group, inline_number, stored_dtype
from ucp_formats.deepspeed.write.optimizer.loss_scale import LossScale, read_loss_scale, scale_numbers
from ucp_formats.deepspeed.write.optimizer.step_forms import StepForm
from ucp_formats.deepspeed.write.optimizer.values import clipping, count_of, group_entry, scalar_value
from ucp_formats.deepspeed.write.run import RunFacts

__all__ = ["Members", "Wrapper", "is_flat", "members", "optimizer_state", "wrapper"]

Members = Sequence[tuple[Group, Sequence[AtomIndex]]]
"""Each group with the parameters that its optimizer counts, in its order."""

_OF_TORCH = frozenset({"amsgrad", "foreach", "maximize"})
"""Hyper-parameters that Adam and AdamW of torch always have (`__setstate__` adds them), and FusedAdam never."""


class Wrapper(StrEnum):
    """Which class of DeepSpeed holds the optimizer at stage 0."""

    PLAIN = "the optimizer itself"
    UNFUSED = "FP16_UnfusedOptimizer"
    FUSED = "FP16_Optimizer"


def wrapper(facts: RunFacts, groups: Sequence[Group]) -> Wrapper:
    """The class that the engine of the target will use (`_configure_fp16_optimizer`, 0.19.8).

    Where the training script builds the optimizer itself, `bias_correction` among the hyper-parameters tells of
    FusedAdam, unless there are some that every Adam of torch has: its `load_state_dict` keeps a `bias_correction` that
    it finds, as `group_entry` writes one.
    """
    if facts.precision is Precision.FP32:
        return Wrapper.PLAIN
    fused = facts.config.names_fused_adam
    if not facts.config.names_optimizer:
        unfused = facts.extras.mapping("optimizer").get("class") == "FP16_UnfusedOptimizer"
        hyper = groups[0].hyper.keys() if groups else ()
        fused = "bias_correction" in hyper and _OF_TORCH.isdisjoint(hyper) and not unfused
    return Wrapper.FUSED if fused else Wrapper.UNFUSED


def is_flat(facts: RunFacts, groups: Sequence[Group], stage: int) -> bool:
    """Whether all parameters of a group lie in one buffer, with one step; a state that one lacks is zeros then."""
    return stage > 0 or (bool(groups) and wrapper(facts, groups) is Wrapper.FUSED)


def members(facts: RunFacts, groups: Sequence[Group], kind: Wrapper) -> Members:
    """What the optimizer of each group counts. Raises UnsupportedError when that is not known."""
    return _plain_params(facts.index, groups) if kind is Wrapper.PLAIN else [(group, group.params) for group in groups]


def optimizer_state(draft: AtomDraft, facts: RunFacts, counted: Members, kind: Wrapper) -> dict[str, object]:
    """`optimizer` of the model-states file."""
    if kind is Wrapper.PLAIN:
        return _per_parameter(draft, facts, counted)
    groups = [group for group, _ in counted]
    scale = LossScale(dynamic=False, cur_scale=1.0)
    if facts.precision is Precision.FP16:
        scale = read_loss_scale(facts.extras.get("loss_scaler"), facts.config)
    if kind is Wrapper.UNFUSED:
        inner = _per_parameter(draft, facts, counted)
        masters = [
            [draft.whole(atom.name, WEIGHT, stored_dtype(atom, WEIGHT, facts.dtypes)) for atom in group.params]
            for group in groups
        ]
        return {**scale_numbers(scale), "optimizer_state_dict": inner, "fp32_groups": masters}
    numbers = scale_numbers(scale) if facts.precision is Precision.FP16 else {}
    flats = [(group, _flat_numel(group), _stored(draft, group)) for group in groups]
    return {
        **numbers,
        "optimizer_state_dict": _per_group(draft, flats),
        "fp32_groups_flat": [
            draft.flat(WEIGHT, group.weight_dtype(facts.dtypes), numel, stored) for group, numel, stored in flats
        ],
        "clip_grad": 0.0,
        **clipping(facts, 0),
    }


def _per_parameter(draft: AtomDraft, facts: RunFacts, counted: Members) -> dict[str, object]:
    """state_dict of a torch optimizer with one entry per parameter; one that was never stepped has none."""
    state: dict[int, object] = {}
    entries = []
    number = 0
    for group, atoms in counted:
        entries.append(group_entry(draft, group, range(number, number + len(atoms))))
        for atom in atoms:
            own = {name: _own_value(draft, facts, atom, name, group.steps) for name in atom.states if name != WEIGHT}
            if own:
                state[number] = own
            number += 1
    return {"state": state, "param_groups": entries}


def _own_value(draft: AtomDraft, facts: RunFacts, atom: AtomIndex, state: str, steps: StepForm) -> object:
    if inline_number(atom, state) is not None:
        return count_of(draft, atom, state, steps)
    return draft.whole(atom.name, state, stored_dtype(atom, state, facts.dtypes))


def _per_group(draft: AtomDraft, flats: Sequence[tuple[Group, int, list[Stored]]]) -> dict[str, object]:
    """state_dict of a torch optimizer over one flat master per group."""
    state = {
        number: {
            name: draft.flat(name, group.elementwise[name], numel, stored)
            if name in group.elementwise
            else scalar_value(draft, group, name)
            for name in group.state_names
        }
        for number, (group, numel, stored) in enumerate(flats)
        if group.state_names
    }
    entries = [group_entry(draft, group, [number]) for number, (group, _, _) in enumerate(flats)]
    return {"state": state, "param_groups": entries}


def _flat_numel(group: Group) -> int:
    """Elements of a group's flat master, which has no padding."""
    return sum(numel for _, numel in group.sizes)


def _stored(draft: AtomDraft, group: Group) -> list[Stored]:
    """All parameters of a group one after another."""
    used = _flat_numel(group)
    *_, buffer = shared_buffers(dict(group.sizes), ranks=1, paddings=None, first=used, known_from="FP16_Optimizer")
    return draft.stored(buffer, buffer.axes(), 0)


def _plain_params(index: Index, groups: Sequence[Group]) -> list[tuple[Group, list[AtomIndex]]]:
    """Each group with all its parameters: those without elements too, which only a torch optimizer keeps."""
    found = [[index.atoms[name] for name in group.params] for group in index.groups]
    grouped = {name for group in index.groups for name in group.params}
    empty = [atom for atom in index.atoms.values() if atom.kind is not Kind.BUFFER and 0 in atom.global_shape]
    place = {name: position for position, name in enumerate(index.atoms)}
    lost = []
    for atom in empty:
        if atom.name in grouped:
            continue
        alike = [own for own in found if any(len(m.global_shape) == len(atom.global_shape) for m in own)]
        homes = found if len(found) == 1 else alike
        if len(homes) == 1:
            homes[0].insert(sum(place[m.name] < place[atom.name] for m in homes[0]), atom)
        else:
            lost.append(f"{atom.name} {list(atom.global_shape)}")
    if lost:
        raise UnsupportedError(
            "a stage-0 optimizer counts parameters without elements too, and the source does not say which group they "
            f"belong to:\n{listed(lost)}\nwrite files of stage 1 to 3, which leave them out"
        )
    return list(zip(groups, found, strict=True))
