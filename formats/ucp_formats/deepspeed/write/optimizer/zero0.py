"""The optimizer of stage 0, which lies inside the model-states file, in one of three shapes.

- `plain`: a torch optimizer over the model's own parameters (fp32);
- `unfused`: FP16_UnfusedOptimizer, a master per parameter (fp16 or bf16 with any optimizer but FusedAdam);
- `fused`: FP16_Optimizer, one flat master per group and no padding (fp16 or bf16 with FusedAdam).

None of them names its parameters. The names of each group stand in `param_shapes` of the model-states file, which
DeepSpeed leaves None at stage 0 and never reads; `param_names` in the groups would make torch refuse to add a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from ucp.core.index import AtomIndex, Kind
from ucp.core.names import WEIGHT
from ucp.errors import UnsupportedError, listed
from ucp_formats.deepspeed.config import Precision, read_loss_scale, scale_numbers
from ucp_formats.deepspeed.partition import shared_buffers
from ucp_formats.deepspeed.write.optimizer.groups import Group, clipping, group_entry, write_count
from ucp_formats.deepspeed.write.run import AtomDraft, RunFacts, is_plain_number

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


def optimizer_state(draft: AtomDraft, facts: RunFacts, counted: Members, kind: Wrapper) -> dict[str, object]:
    """`optimizer` of the model-states file."""
    if kind is Wrapper.PLAIN:
        return _per_parameter(draft, facts, counted)
    is_scaled = facts.precision is Precision.FP16
    scale: Mapping[str, object] = {"dynamic": False, "cur_scale": 1.0, "cur_iter": 0}
    scale = read_loss_scale(facts.extras.get("loss_scaler"), facts.config) if is_scaled else scale
    if kind is Wrapper.UNFUSED:
        inner = _per_parameter(draft, facts, counted)
        masters = [
            [draft.whole(atom.name, WEIGHT, atom.dtype_of(WEIGHT, facts.dtypes)) for atom in group.params]
            for group, _ in counted
        ]
        return {**scale_numbers(scale), "optimizer_state_dict": inner, "fp32_groups": masters}
    state: dict[int, object] = {}
    flat_masters: list[object] = []
    for number, (group, _) in enumerate(counted):
        numel = sum(numel for _, numel in group.sizes)  # a flat master has no padding
        *_, buffer = shared_buffers(dict(group.sizes), ranks=1, paddings=None, first=numel, known_from="FP16_Optimizer")
        stored = draft.stored(buffer, buffer.axes(), 0)
        flat_masters.append(draft.flat(WEIGHT, group.dtypes[WEIGHT], numel, stored))
        if group.state_names:
            state[number] = {
                name: draft.flat(name, group.dtypes[name], numel, stored)
                if name in group.dtypes
                else write_count(draft, facts, group.counters[name], name)
                for name in group.state_names
            }
    entries = [group_entry(draft, facts, group, [number]) for number, (group, _) in enumerate(counted)]
    return {
        **(scale_numbers(scale) if is_scaled else {}),
        "optimizer_state_dict": {"state": state, "param_groups": entries},
        "fp32_groups_flat": flat_masters,
        "clip_grad": 0.0,
        **clipping(facts, 0),
    }


def _per_parameter(draft: AtomDraft, facts: RunFacts, counted: Members) -> dict[str, object]:
    """state_dict of a torch optimizer with one entry per parameter; one that was never stepped has none."""
    state: dict[int, object] = {}
    entries = []
    first = 0
    for group, atoms in counted:
        numbers = range(first, first + len(atoms))
        entries.append(group_entry(draft, facts, group, numbers))
        for number, atom in zip(numbers, atoms, strict=True):
            values = {
                name: write_count(draft, facts, atom, name)
                if is_plain_number(atom, name)
                else draft.whole(atom.name, name, atom.dtype_of(name, facts.dtypes))
                for name in atom.states
                if name != WEIGHT
            }
            if values:
                state[number] = values
        first = numbers.stop
    return {"state": state, "param_groups": entries}


def members(facts: RunFacts, groups: Sequence[Group], kind: Wrapper) -> Members:
    """What the optimizer of each group counts: parameters without elements too where it is a torch optimizer itself.

    Raises UnsupportedError when that is not known.
    """
    if kind is not Wrapper.PLAIN:
        return [(group, group.params) for group in groups]
    index = facts.index
    members = [[index.atoms[name] for name in group.params] for group in index.groups]
    grouped = {name for group in index.groups for name in group.params}
    order = {name: position for position, name in enumerate(index.atoms)}
    unknown = []
    for atom in index.atoms.values():
        if atom.name in grouped or atom.kind is Kind.BUFFER or 0 not in atom.global_shape:
            continue
        alike = [atoms for atoms in members if any(len(own.global_shape) == len(atom.global_shape) for own in atoms)]
        homes = members if len(members) == 1 else alike
        if len(homes) == 1:
            homes[0].insert(sum(order[own.name] < order[atom.name] for own in homes[0]), atom)
        else:
            unknown.append(f"{atom.name} {list(atom.global_shape)}")
    if unknown:
        raise UnsupportedError(
            "a stage-0 optimizer counts parameters without elements too, and the source does not say which group they "
            f"belong to:\n{listed(unknown)}\nwrite files of stage 1 to 3, which leave them out"
        )
    return list(zip(groups, members, strict=True))
