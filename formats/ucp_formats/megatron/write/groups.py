"""The optimizers of a target run and their parameter groups, made from the groups of any source.

Megatron finds a saved group by its settings (`wd_mult`, `lr_mult`, `is_expert_parallel`, ...), not by its position
(optimizer.py: param_group_identifier_keys). With expert parallelism experts have a separate optimizer, the second in a
chain; otherwise they are parameters like others. So groups are split or merged for the topology of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ucp.contract.optimizer import OptimizerPlan
from ucp.contract.ranks import Checksums
from ucp.core.index import STEP, Index, Kind, ParamGroup
from ucp.core.tensor import DType

_EXPERT = "is_expert_parallel"
_NOT_SETTINGS = {"params", "step", "param_names", _EXPERT}
"""Keys that do not distinguish the groups of a source."""
_TRANSLATED = (
    "the parameter groups of {format} are written as Megatron's: a run applies its own rule for which parameters decay "
    "(all but biases and vectors); megatron-core 0.19 also identifies groups by --lr and --min-lr, which have to equal "
    "those of the source"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """One parameter group of one optimizer."""

    params: tuple[str, ...]
    """Names of its parameters, in no particular order."""
    hyper: Mapping[str, object]
    """Its hyper-parameters."""
    step: int | float | None
    """Steps of all its parameters; None if the source has no count."""
    counts: bool = True
    """Whether the group records the step, as for Adam of Apex and Transformer Engine; false for torch's Adam."""
    each: bool = False
    """Whether every parameter records the step, which torch's Adam needs; only without the distributed optimizer."""

    def entry(self) -> dict[str, object]:
        """The group as Megatron saves it, without its parameters."""
        return dict(self.hyper) if self.step is None else {**self.hyper, "step": self.step}


def make_chain(
    index: Index, experts: frozenset[str], optimizer: OptimizerPlan, *, split: bool
) -> tuple[tuple[tuple[OptimizerGroup, ...], ...], tuple[str, ...]]:
    """Groups of each optimizer in the chain, and notes for the user.

    `experts`: names of expert parameters. `optimizer`: gives step counts, and notes their casts. `split`: whether
    experts have a separate optimizer. Raises UnsupportedError if parameters of a group have different steps.
    """
    if not index.groups:
        return (), ()
    native = is_native(index)
    # Megatron's groups have parameters with `requires_grad` (core/optimizer/__init__.py, _get_param_groups)
    trained = {name for name, atom in index.atoms.items() if atom.kind is not Kind.FROZEN}
    groups = [replace(group, params=tuple(n for n in group.params if n in trained)) for group in index.groups]
    merged = _merge_groups(groups if native else map(_translate_group, groups))
    if not native:
        missing = {1.0, 0.0} - {group.hyper["wd_mult"] for group in merged}  # Megatron's optimizer needs both
        merged += [ParamGroup(params=(), hyper={**merged[0].hyper, "wd_mult": mult}) for mult in missing]
        merged.sort(key=lambda group: not group.hyper["wd_mult"])
    steps = [_find_step(index, group, optimizer, exact=native) for group in merged]
    first_step = next((step for step in steps if step is not None), None)
    counts = not native or not any(isinstance(step, float) for step in steps)

    def select_groups(*, of_experts: bool | None) -> tuple[OptimizerGroup, ...]:
        return tuple(
            OptimizerGroup(
                params=tuple(name for name in group.params if of_experts in (None, name in experts)),
                hyper={**_settings(group), _EXPERT: bool(of_experts)},
                step=first_step if step is None else step,
                counts=counts,
                each=not native or not counts,
            )
            for group, step in zip(merged, steps, strict=True)
        )

    notes = () if native else (_TRANSLATED.format(format=index.format),)
    if not split:
        return (select_groups(of_experts=None),), notes
    expert_groups = tuple(group for group in select_groups(of_experts=True) if group.params)
    return (select_groups(of_experts=False), expert_groups), notes


def is_native(index: Index) -> bool:
    """Whether the groups are Megatron's."""
    return all("wd_mult" in group.hyper or "pre_wd_mult" in group.hyper for group in index.groups)


def _settings(group: ParamGroup) -> dict[str, object]:
    return {key: value for key, value in group.hyper.items() if key not in _NOT_SETTINGS}


def _merge_groups(groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """Merge groups with the same settings; decayed groups come first."""
    merged: list[ParamGroup] = []
    same = Checksums(()).is_same
    for group in groups:
        number = next((n for n, other in enumerate(merged) if same(_settings(other), _settings(group))), None)
        if number is None:
            merged.append(group)
        else:
            merged[number] = replace(merged[number], params=(*merged[number].params, *group.params))
    return sorted(merged, key=lambda group: not group.hyper.get("wd_mult", group.hyper.get("pre_wd_mult")))


def _translate_group(group: ParamGroup) -> ParamGroup:
    """A group of another framework, with the settings that Megatron's groups have."""
    settings: dict[str, object] = {
        "wd_mult": 1.0 if group.hyper.get("weight_decay", 0.0) else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": group.hyper.get("initial_lr", group.hyper.get("lr")),
        "min_lr": 0.0,
    }
    return replace(group, hyper={**settings, **group.hyper})


def _find_step(index: Index, group: ParamGroup, optimizer: OptimizerPlan, *, exact: bool) -> int | float | None:
    """Steps of all parameters of a group. `exact`: keep the type of the source; else an int, as Apex's Adam needs."""
    remedy = "convert to atoms or to stage-0 files of DeepSpeed, which keep one per parameter"
    first = optimizer.find_common_count(group.params, keeper="Megatron keeps it", remedy=remedy)
    recorded = group.hyper.get("step")
    step = recorded if isinstance(recorded, int | float) else None
    step = step if first is None else optimizer.count(first)
    if step is not None and not exact and float(step).is_integer():
        step = int(step)
    for name in group.params:
        if optimizer.count(name) is not None:
            written = DType.FLOAT64 if isinstance(step, float) else DType.INT64
            optimizer.note_cast(STEP, index.atoms[name].states[STEP].dtype, written)
    return step
